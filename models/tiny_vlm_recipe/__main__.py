"""The command line of `scripts/make-tiny-model`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from models.tiny_vlm_recipe.pictures import EXAMPLE_SEEDS, draw_picture

EXAMPLES = """\
examples:
  scripts/make-tiny-model --arch qwen2_5_vl --out models/tiny-vlm/qwen2_5_vl
      train from scratch; the same seed and library versions give the same bytes
  scripts/make-tiny-model --check --out models/tiny-vlm/qwen3_vl
      ask held-out questions; exit 1 if the answers are not good enough
  scripts/make-tiny-model --random --arch qwen2_vl --out random
      untrained weights, for tests that only need the format
  scripts/make-tiny-model --random --lm-hidden 1024 --lm-layers 17 --dtype bfloat16 --out large
      a large language model beside a small vision tower
  scripts/make-tiny-model --pictures examples
      the pictures that the README shows to the model
"""
# Seeds picked for the eye: all three noisy, each with another figure.
PICTURED = {"red": EXAMPLE_SEEDS + 1, "blue": EXAMPLE_SEEDS + 12, "green": EXAMPLE_SEEDS + 24}
PICTURE_SIZE = (224, 224)
SIZES = ("lm_hidden", "lm_layers", "vis_hidden", "vis_depth")
RANDOM_ONLY = (*SIZES, "dtype", "shard_bytes")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.pictures is not None:
        return write_pictures(options.pictures)
    if options.out is None:
        parser.error("--out is missing: name the folder of the checkpoint")
    misplaced = [name for name in RANDOM_ONLY if getattr(options, name) is not None and not options.random]
    if misplaced:
        parser.error(
            f"--{misplaced[0].replace('_', '-')} needs --random: the trained sizes are part of the recipe"
        )
    try:
        return _run(options)
    except ValueError as problem:
        parser.error(str(problem))


def write_pictures(folder: Path) -> int:
    """Write one picture of each of some colours as PNG files; return the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    for colour, seed in PICTURED.items():
        path = folder / f"{colour}.png"
        draw_picture(seed, colour=colour, size=PICTURE_SIZE).image.save(path)
        print(path)
    return 0


def _run(options: argparse.Namespace) -> int:
    # Here and not at the top: --help and --pictures work without torch.
    from models.tiny_vlm_recipe import commands
    from models.tiny_vlm_recipe.architecture import Sizes

    if options.check:
        return commands.check(options.out, per_task=options.per_task)
    if options.random:
        given = {name: value for name in SIZES if (value := getattr(options, name)) is not None}
        commands.write_random(
            options.out,
            architecture=options.arch,
            seed=options.seed,
            sizes=Sizes(**given),
            dtype=options.dtype or "float32",
            shard_bytes=options.shard_bytes,
        )
        return 0
    commands.write_trained(options.out, architecture=options.arch, seed=options.seed)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make-tiny-model",
        description="Train or check a tiny Qwen-VL checkpoint. Progress goes to stderr, results to stdout.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the checkpoint")
    parser.add_argument(
        "--arch",
        choices=("qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
        default="qwen2_5_vl",
        help="architecture (default qwen2_5_vl; qwen2_vl only with --random)",
    )
    parser.add_argument("--seed", type=int, default=0, help="0 to 999, default 0")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", action="store_true", help="evaluate the checkpoint in --out instead of training"
    )
    mode.add_argument("--random", action="store_true", help="write random weights instead of training")
    mode.add_argument(
        "--pictures", type=Path, metavar="DIR", help="write example pictures instead of training"
    )
    parser.add_argument(
        "--per-task", type=int, default=240, help="with --check: questions a task, at least 100, default 240"
    )
    sizes = parser.add_argument_group("with --random")
    sizes.add_argument("--lm-hidden", type=int, metavar="N", help="language model width, default 64")
    sizes.add_argument("--lm-layers", type=int, metavar="N", help="language model layers, default 3")
    sizes.add_argument("--vis-hidden", type=int, metavar="N", help="vision tower width, default 64")
    sizes.add_argument("--vis-depth", type=int, metavar="N", help="vision tower layers, default 2")
    sizes.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights, default float32")
    sizes.add_argument(
        "--shard-bytes", type=int, metavar="N", help="split the weights over files of this size"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
