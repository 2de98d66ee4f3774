"""`epdctl instances …`: the admin API of a running proxy, for people and scripts."""
