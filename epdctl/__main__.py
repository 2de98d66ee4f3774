"""`python -m epdctl` is `epdctl`."""

from epdctl.cli import main

raise SystemExit(main())
