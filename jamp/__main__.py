"""`python -m jamp`: what autocast would do on this machine, and policies as text."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import jax

from jamp import Policy, __version__
from jamp._errors import JampError
from jamp._policy import Rule
from jamp._processor import multiplies_bfloat16
from jamp._regions import device_kind

_BFLOAT16 = {
    True: "has instructions for it",
    False: "has no instructions for it (AVX512-BF16 or AMX): 16 bits save no time",
    None: "not known",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: what stands after `python -m jamp`; by default the process's own.

    Returns:
      The exit code: 0, or 1 for an error of the user's or, of `policy --diff`, if the
      policies differ.
    """
    chosen = _parser().parse_args(arguments)
    try:
        lines, code = chosen.run(chosen)
    except JampError as error:
        sys.stderr.write(f"jamp: {error}\n")
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return int(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jamp", description="Automatic mixed precision for JAX."
    )
    parser.add_argument("--version", action="version", version=f"jamp {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    info = commands.add_parser(
        "info",
        help="versions, devices, and what autocast would choose here",
        description="Prints versions, devices, and what autocast would choose here.",
    )
    info.set_defaults(run=_info)
    policy = commands.add_parser(
        "policy",
        help="print a policy, check a file, or compare two",
        description="Prints a policy, rule by rule. A file that is no policy is an "
        "error that names the line at fault.",
    )
    policy.add_argument(
        "source",
        nargs="?",
        help="gpu, cpu, tpu or the path of a TOML file; by default that of the devices",
    )
    policy.add_argument(
        "--diff",
        metavar="OTHER",
        help="print what differs from another policy; exit code 1 if anything does",
    )
    policy.set_defaults(run=_policy)
    return parser


def _info(chosen: argparse.Namespace) -> tuple[list[str], int]:
    del chosen
    kind = device_kind(None)
    packages = {"jamp": __version__, "python": platform.python_version()}
    for package in ("jax", "jaxlib", "optax", "flax"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "not installed"
    devices = ", ".join(str(device) for device in jax.devices())
    rows = {
        **packages,
        "devices": devices,
        "policy": kind,
        "dtype": Policy.load(kind).dtype.name,
    }
    if kind == "cpu":
        rows["bfloat16 on this processor"] = _BFLOAT16[multiplies_bfloat16()]
    width = max(map(len, rows))
    return [f"{name:{width}}  {value}" for name, value in rows.items()], 0


def _policy(chosen: argparse.Namespace) -> tuple[list[str], int]:
    policy = Policy.load(chosen.source or device_kind(None))
    if chosen.diff is None:
        return list(_printed(policy)), 0
    lines = list(_compared(policy, Policy.load(chosen.diff)))
    return lines, bool(lines)


def _rules(policy: Policy) -> dict[str, Rule]:
    """The rule of every entry, by the name that a table gives it."""
    scopes = {f"scope {pattern!r}": rule for pattern, rule in policy.scopes}
    functions = {function.name: rule for function, rule in policy.functions}
    return {**dict(policy.primitives), **functions, **scopes}


def _printed(policy: Policy) -> Iterator[str]:
    yield f"policy {policy.name}, dtype {policy.dtype.name}"
    rules = _rules(policy)
    for rule in Rule:
        names = sorted(name for name, given in rules.items() if given is rule)
        if names:
            yield ""
            yield f"{rule.value} ({len(names)})"
            yield from (f"  {name}" for name in names)
    for unsafe in policy.unsafe:
        yield ""
        yield f"unsafe in {unsafe.dtype.name}"
        yield f"  {', '.join(unsafe.primitives)} of {', '.join(unsafe.of)}"


def _compared(one: Policy, other: Policy) -> Iterator[str]:
    """A line for every entry whose rule differs."""
    if one.dtype != other.dtype:
        yield f"dtype: {one.dtype.name} -> {other.dtype.name}"
    ours, theirs = _rules(one), _rules(other)
    for name in sorted(ours.keys() | theirs.keys()):
        old, new = ours.get(name), theirs.get(name)
        if old is not new:
            yield f"{name}: {_value(old)} -> {_value(new)}"
    if one.unsafe != other.unsafe:
        yield "unsafe combinations differ"


def _value(rule: Rule | None) -> str:
    return "no rule" if rule is None else rule.value


if __name__ == "__main__":
    sys.exit(main())
