"""Prints the idioms that are unsafe under autocast, and how many are safe."""

import argparse
import re
import sys
import warnings

import jax

from . import NAMED, UNSAFE, cases
from ._measure import LOW


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.dtypes.idioms", description=__doc__
    )
    parser.add_argument("--policy", choices=LOW, action="append")
    parser.add_argument("-k", default="", help="a pattern of the idioms' names")
    parser.add_argument("--all", action="store_true", help="safe cases too")
    parser.add_argument(
        "--torch",
        choices=["as-written", "float"],
        help="measure torch.autocast on CPUs, without or with .float() at the start",
    )
    parser.add_argument("--write", action="store_true", help=f"write {UNSAFE.name}")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "this processor (has no instructions|multiplies)")
    # What makes a small program fast takes longer than running it a few times.
    jax.config.update("jax_disable_most_optimizations", True)
    policies = tuple(options.policy or LOW)
    runs, names = {}, NAMED
    if options.torch:
        from .in_torch import WITHOUT, in_torch

        policies, cast = ("cpu",), options.torch == "float"
        runs = {"runs": lambda idiom, _: in_torch(idiom, cast=cast)}
        names = {name: idiom for name, idiom in NAMED.items() if name not in WITHOUT}
    found = []
    for idiom in names.values():
        if re.search(options.k, idiom.name):
            for case in cases(idiom, policies, **runs):
                found.append(case)
                if options.all or not case.safe:
                    print(case, flush=True)
    keys = {case.key for case in found if not case.safe}
    asked = {case.key for case in found}
    safe = sum(case.safe for case in found)
    print(
        f"{safe} of {len(found)} cases are safe; "
        f"{len(asked) - len(keys)} of {len(asked)} idioms, policies and passes"
    )
    if options.write:
        kept = {line for line in UNSAFE.read_text().splitlines() if line not in asked}
        UNSAFE.write_text("".join(f"{line}\n" for line in sorted(kept | keys)))


if __name__ == "__main__":
    sys.exit(main())
