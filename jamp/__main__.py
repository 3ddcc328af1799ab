"""`python -m jamp`: what autocast would do here or does with a function; policies."""

import argparse
import importlib
import json
import platform
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax

from jamp import Diagnosis, Policy, Report, __version__, diagnose, explain
from jamp._errors import JampError, TargetError
from jamp._lowerings.processor import this_processor
from jamp._policy.policy import named_rules
from jamp._tracing.locations import users_frame
from jamp._tracing.options import device_kind

_BFLOAT16 = {
    True: "matrix products take less time in 16 bits, the rest of a model does not",
    False: "matrix products take no less time in 16 bits, convolutions may",
    None: "not known",
}
_TARGET = {
    "function": "module:function, as in train:loss_fn, or file.py:function; the module "
    "is imported, which runs the file",
    "inputs": "a Python file, run too, that sets args, a tuple of the function's "
    "arguments, and kwargs, a dict, if wanted",
    "--device-type": "gpu, cpu or tpu; by default the device that there is",
    "--dtype": "float16 or bfloat16; by default the policy's",
    "--policy": "gpu, cpu, tpu or the path of a TOML file",
}
# What a command prints, and its exit code.
Outcome = tuple[Iterable[str], int]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: what stands after `python -m jamp`; by default the process's own.

    Returns:
      The exit code: 0; 1 if `policy --diff` found a difference or `diagnose` a fault;
      2 for an error of the user's.
    """
    chosen = _parser().parse_args(arguments)
    try:
        lines, code = chosen.run(chosen)
    except (JampError, OSError) as error:
        sys.stderr.write(f"jamp: {error}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return int(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jamp", description="Automatic mixed precision for JAX."
    )
    parser.add_argument("--version", action="version", version=f"jamp {__version__}")
    # Alone it prints what there is.
    parser.set_defaults(run=lambda _: ([parser.format_help().rstrip()], 0))
    commands = parser.add_subparsers(metavar="command")
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
        "error that names what is at fault.",
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
    _add_commands_for_functions(commands.add_parser)
    return parser


def _add_commands_for_functions(
    add_parser: Callable[..., argparse.ArgumentParser],
) -> None:
    explain = add_parser(
        "explain",
        help="what autocast does with a function, and why",
        description="Prints what autocast does with a function: what runs in which "
        "dtype, and why. The function is traced, not run; the file that it "
        "stands in is run, as by import.",
    )
    diagnose = add_parser(
        "diagnose",
        help="where 16 bits hurt a function, and what to do",
        description="Runs a function in float32 and under autocast side by side, and "
        "prints where 16 bits hurt and what would cure it. Exit code 1 if they do.",
    )
    for name, text in _TARGET.items():
        explain.add_argument(name, help=text)
        diagnose.add_argument(name, help=text)
    explain.add_argument(
        "--group",
        choices=("function", "module", "equation"),
        default="function",
        help="what a line stands for (default: %(default)s)",
    )
    explain.add_argument("--html", metavar="FILE", help="write a page for a browser")
    explain.add_argument("--json", metavar="FILE", help="write the report as data")
    explain.set_defaults(run=_explain)
    diagnose.add_argument(
        "--loss-scale",
        type=float,
        metavar="SCALE",
        help="also run the gradient of the function, a loss multiplied by this",
    )
    diagnose.add_argument(
        "--has-aux",
        action="store_true",
        help="the function returns a pair of the loss and something else",
    )
    diagnose.add_argument(
        "--argnums",
        type=_numbers,
        default=[0],
        metavar="N[,N]",
        help="which arguments the gradient is taken of, as in --argnums=0,-1 (default: "
        "0, the first)",
    )
    diagnose.add_argument(
        "--plot", metavar="FILE", help="draw exponents, in the format of the suffix"
    )
    diagnose.add_argument("--json", metavar="FILE", help="write the diagnosis as data")
    diagnose.set_defaults(run=_diagnose)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        what = f"{text!r}: give numbers, as in 0 or 0,1"
        raise argparse.ArgumentTypeError(what) from None


def _info(chosen: argparse.Namespace) -> Outcome:
    del chosen
    kind = device_kind(None)
    rows = {"jamp": __version__, "python": platform.python_version()}
    for package in ("jax", "jaxlib", "optax", "flax"):
        try:
            rows[package] = version(package)
        except PackageNotFoundError:
            rows[package] = "not installed"
    rows["devices"] = ", ".join(map(str, jax.devices()))
    rows["policy"] = kind
    rows["dtype"] = Policy.load(kind).dtype.name
    if kind == "cpu":
        processor = this_processor()
        known = ", ".join(sorted(processor.instructions))
        words = filter(None, (known, _BFLOAT16[processor.gains]))
        rows["bfloat16 on this processor"] = ": ".join(words)
    width = max(map(len, rows))
    return [f"{name:{width}}  {value}" for name, value in rows.items()], 0


def _policy(chosen: argparse.Namespace) -> Outcome:
    policy = Policy.load(chosen.source or device_kind(None))
    if chosen.diff is None:
        return [str(policy)], 0
    lines = list(_compared(policy, Policy.load(chosen.diff)))
    return lines, bool(lines)


def _compared(*policies: Policy) -> Iterator[str]:
    """A line for every entry whose rule, or what it holds for, differs."""
    rules = list(map(_rules_in_words, policies))
    rows = {"dtype": [policy.dtype.name for policy in policies]}
    for name in sorted(rules[0].keys() | rules[1].keys()):
        rows[name] = [found.get(name, "no rule") for found in rules]
    rows["gradients of weights"] = [
        "float32" if policy.float32_gradients else "16 bits" for policy in policies
    ]
    rows["results in the dtype of activations"] = [
        ", ".join(sorted(found.name for found in policy.activation_results)) or "none"
        for policy in policies
    ]
    for name, (old, new) in rows.items():
        if old != new:
            yield f"{name}: {old} -> {new}"
    if policies[0].unsafe != policies[1].unsafe:
        yield "unsafe combinations differ"


def _rules_in_words(policy: Policy) -> dict[str, str]:
    found = {name: rule.value for name, rule in named_rules(policy).items()}
    for function, _ in policy.functions:
        if function.elementwise:
            found[function.name] += " of elementwise calls"
        if function.own_code:
            found[function.name] += " in its own code"
    return found


def _explain(chosen: argparse.Namespace) -> Outcome:
    function, (args, kwargs), options = _loaded(chosen)
    with _users_code(f"tracing {chosen.function}"):
        report = explain(function, **options)(*args, **kwargs)
    if chosen.html is not None:
        report.save_html(chosen.html)
    _save_json(chosen.json, report)
    return [_shown(report, chosen.group)], 0


def _shown(report: Report, group: str) -> str:
    """The report as text; at a terminal in colour and its width, if there is rich."""
    if group == "function" and sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            return report.text(group)
        console = Console()
        with console.capture() as captured:
            console.print(report)
        return captured.get().rstrip("\n")
    return report.text(group)


def _diagnose(chosen: argparse.Namespace) -> Outcome:
    function, (args, kwargs), options = _loaded(chosen)
    for name in ("loss_scale", "has_aux", "argnums"):
        options[name] = getattr(chosen, name)
    with _users_code(f"running {chosen.function}"):
        diagnosis = diagnose(function, **options)(*args, **kwargs)
    if chosen.plot is not None:
        with _users_code(f"drawing {chosen.plot}"):
            diagnosis.plot(chosen.plot)
    _save_json(chosen.json, diagnosis)
    return [diagnosis.text()], not diagnosis.healthy


def _save_json(file: str | None, result: Report | Diagnosis) -> None:
    if file is not None:
        data = json.dumps(result.to_dict(), indent=2)
        Path(file).write_text(data + "\n", encoding="utf-8")


def _loaded(chosen: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """The function, its inputs, and the options of autocast that are given."""
    options = {name: getattr(chosen, name) for name in ("device_type", "dtype")}
    if chosen.policy is not None:
        options["policy"] = Policy.load(chosen.policy)
    given = {name: value for name, value in options.items() if value is not None}
    return _load_function(chosen.function), _load_inputs(chosen.inputs), given


def _load_function(target: str) -> Callable[..., Any]:
    """What `module:function` or `file.py:function` names, in the working folder too."""
    module, _, name = target.rpartition(":")
    if not module or not name:
        raise TargetError(
            f"{target!r} does not name a function: write module:function, as in "
            "train:loss_fn, or file.py:function"
        )
    if module.endswith(".py"):
        found = _load_file(module)
    else:
        sys.path.insert(0, "")
        with _users_code(f"importing {module}"):
            found = importlib.import_module(module)
    missing = object()
    for part in name.split("."):
        # A module may import what it is asked for.
        with _users_code(f"importing {target}"):
            found = getattr(found, part, missing)
        if found is missing:
            raise TargetError(f"{module} has no {name!r}")
    if not callable(found):
        raise TargetError(f"{target} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def _load_inputs(file: str) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Example inputs from a Python file that sets `args`, and `kwargs` if wanted."""
    found = _load_file(file)
    args, kwargs = getattr(found, "args", None), getattr(found, "kwargs", {})
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise TargetError(
            f"{file} must set args, a tuple of the function's arguments, as in "
            "args = (params, batch); and may set kwargs, a dict"
        )
    return tuple(args), kwargs


@contextmanager
def _users_code(doing: str) -> Iterator[None]:
    """Turns what the user's code raises into an error that names the user's line.

    It finds no arguments in `sys.argv`, which are not for it.
    """
    given, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    except JampError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        found = users_frame(frame.filename for frame in frames)
        place = None if found is None else frames[found]
        where = "" if place is None else f" at {place.filename}:{place.lineno}"
        raise TargetError(
            f"{doing} failed{where}: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.argv = given


def _load_file(file: str) -> Any:
    """What a file defines; it is run once also if another one imports it."""
    folder = Path(file).parent.resolve()
    path = folder / Path(file).name
    if not path.is_file():
        raise TargetError(f"there is no file {file}")
    # It may import what stands beside it, as a script may.
    sys.path.insert(0, str(folder))
    with _users_code(f"running {file}"):
        found = PathFinder.find_spec(path.stem, [str(folder)])
        loaded = sys.modules.get(path.stem)
        origin = loaded.__spec__ if loaded else found
        if origin is None or origin.origin != str(path):
            # Another module has its name, or it has none that can be imported.
            return SimpleNamespace(**runpy.run_path(str(path)))
        return importlib.import_module(path.stem)


if __name__ == "__main__":
    sys.exit(main())
