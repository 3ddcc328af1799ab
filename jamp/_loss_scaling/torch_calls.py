"""What `jamp.GradScaler` says to calls that are written as for torch's."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Never, ParamSpec, TypeVar

from jamp._errors import ScalerTypeError, did_you_mean
from jamp._loss_scaling.arguments import expect, refuse_stack
from jamp._loss_scaling.scaler_state import ScalerState

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C")

if TYPE_CHECKING:
    of_the_class = classmethod
else:

    class of_the_class(classmethod):
        """A method of a class, which would change nothing of an instance."""

        def __get__(self, instance, owner=None):
            return super().__get__(instance, owner) if instance is None else _refused


def no_device(*given: Any) -> ScalerTypeError:
    return ScalerTypeError(
        "a jamp.GradScaler has no device, and takes its options by name, as in "
        f"GradScaler(init_scale=1024.0): got {', '.join(map(repr, given))}"
    )


def no_optimizer() -> ScalerTypeError:
    return ScalerTypeError(
        "a jamp.GradScaler is no optimizer, and its init takes nothing: "
        "jamp.dynamic_loss_scaling(tx, scaler) makes one of an optimizer and a scaler"
    )


def with_named_options(made: type[_C]) -> type[_C]:
    """Has a class say which options it takes, and that these have names."""
    init = vars(made)["__init__"]
    _, _, *known = signature(init).parameters

    @wraps(init)
    def named(self: Any, *unnamed: Any, **options: Any) -> None:
        if len(unnamed) > 1:
            raise no_device(*unnamed)
        unknown = sorted(options.keys() - {*known, "device"})
        if unknown:
            raise ScalerTypeError(
                f"GradScaler takes {', '.join(known)}, not {', '.join(unknown)}"
                + did_you_mean(unknown[0], known)
            )
        init(self, *unnamed, **options)

    made.__init__ = named  # type: ignore[method-assign]
    return made


def _refused(*args: Any, **kwargs: Any) -> Never:
    raise ScalerTypeError(
        "a scaler never changes: load_state_dict returns one and its state, as in "
        "scaler, state = jamp.GradScaler.load_state_dict(state_dict)"
    )


# What stands for methods of torch's that a scaler lacks.
INSTEAD = {
    "get_scale": "state.scale, or jamp.loss_scale(state)",
    "is_enabled": "scaler.enabled",
    "unscale_": "scaler.unscale(state, grads)",
    **{
        f"{verb}_{option}": instead.format(option)
        for option in ("growth_factor", "backoff_factor", "growth_interval")
        for verb, instead in (
            ("get", "scaler.{0}"),
            ("set", "dataclasses.replace(scaler, {0}=...)"),
        )
    },
}


def check_state(state: Any, call: str) -> None:
    """Raises unless a state is one of a scaler's, and says how a method is called."""
    message = f"the state comes first: scaler.{call}, with what scaler.init() or update"
    expect(isinstance(state, ScalerState), state, f"{message} returned;")
    refuse_stack(state.scale)


def takes_state(call: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Has a method say how it is called where its state is missing.

    Python itself would name the parameters that are missing after it.
    """

    def checking(method: Callable[_P, _R]) -> Callable[_P, _R]:
        taken = signature(method)

        @wraps(method)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            state = args[1] if len(args) > 1 else kwargs.get("state")
            check_state(state, call)
            try:
                taken.bind(*args, **kwargs)
            except TypeError as error:
                raise ScalerTypeError(f"{error}; call scaler.{call}") from None
            return method(*args, **kwargs)

        return checked

    return checking
