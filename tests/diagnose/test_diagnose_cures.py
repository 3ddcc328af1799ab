"""What `jamp.diagnose` suggests can be pasted, and does what it says."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diagnosed import EYE, X, diagnose, square

import jamp


def pasted(code, fn, namespace):
    """What a suggestion's code makes of a function in the user's module."""
    names = {**namespace, "jamp": jamp, "jnp": jnp, "fn": fn}
    *policy, call = code.splitlines()
    exec("\n".join(policy), names)
    return eval(call, names)


SCRIPT = """
import jax
import jax.numpy as jnp

class Model:
    def scores(self, q):
        return q * q

    def __call__(self, x, w):
        return jnp.mean((self.scores(x @ w) * 2**-10) @ w)
"""


def test_the_rule_for_a_method_in_a_script_can_be_pasted():
    script = {"__name__": "__main__"}
    exec(compile(SCRIPT, "script.py", "exec"), script)
    model = script["Model"]()
    (suggestion,) = diagnose(lambda x: model(x, EYE))(X).suggestions
    assert "[Model.scores]" in suggestion.code
    cured = pasted(suggestion.code, model, script)(X, EYE)
    np.testing.assert_allclose(cured, model(X, EYE), rtol=0.01)


def mean(h):
    """The mean of what a matmul reads, and with it all in front of it, in 16 bits."""
    return jnp.mean((h * 2**-10) @ EYE)


def small_squares(x):
    def square_here(h):
        return h * h

    return square_here(x) * 2**-10


def test_a_function_that_is_local_to_another_is_not_named():
    def fn(x):
        return jnp.mean(small_squares(x @ EYE) @ EYE) + jnp.mean(x @ EYE @ EYE)

    (suggestion,) = diagnose(fn)(X).suggestions
    cured = pasted(suggestion.code, fn, globals())(X)
    np.testing.assert_allclose(cured, fn(X), rtol=0.01)


def test_a_function_that_is_local_to_where_the_diagnosed_one_is_defined_is_named():
    def cube(h):
        return h * h * h

    def fn(x):
        return mean(cube(x @ EYE) * 2**-3)

    (suggestion,) = diagnose(fn)(X).suggestions
    assert "float32=[cube]" in suggestion.code
    cured = pasted(suggestion.code, fn, {"cube": cube})(X)
    np.testing.assert_allclose(cured, fn(X), rtol=0.01)


class Energy:
    """Computes squares in every kind of method."""

    def __init__(self, x):
        self.x = x

    @property
    def of_property(self):
        return self.x * self.x

    @staticmethod
    def of_static(h):
        return h * h

    @classmethod
    def of_class(cls, h):
        return h * h

    def __private(self):
        return self.x * self.x

    def of_private(self):
        return self.__private()


@pytest.mark.parametrize(
    "name, compute",
    [
        (f"{square.__module__}.square", square),
        (f"{__name__}.Energy.of_property", lambda h: Energy(h).of_property),
        (f"{__name__}.Energy.of_static", Energy.of_static),
        (f"{__name__}.Energy.of_class", Energy.of_class),
        (f"{__name__}.Energy._Energy__private", lambda h: Energy(h).of_private()),
    ],
)
def test_a_name_that_a_policy_finds_is_quoted(name, compute):
    def fn(x):
        return mean(compute(x @ EYE))

    (suggestion,) = diagnose(fn)(X).suggestions
    assert f'"{name}"' in suggestion.code
    cured = pasted(suggestion.code, fn, {})(X)
    np.testing.assert_allclose(cured, fn(X), rtol=0.01)


def unmarked(fn):
    """A decorator that does not keep `__wrapped__`."""
    return lambda *args: fn(*args)


@unmarked
def decorated(h):
    return h * h


def test_what_has_the_name_of_its_decorators_function_is_not_named():
    def fn(x):
        return mean(decorated(x @ EYE))

    (suggestion,) = diagnose(fn)(X).suggestions
    assert suggestion.cured
    assert "decorated" not in suggestion.code


def test_the_call_that_is_suggested_keeps_the_users_policy_and_device():
    policy = jamp.Policy.load("gpu").with_rules(lower=["jax.nn.softmax"])

    def fn(x):
        return jnp.mean((x * 1e4).astype(jamp.get_autocast_dtype()))

    (suggestion,) = diagnose(fn, policy=policy)(X).suggestions
    assert suggestion.code == (
        'jamp.autocast(fn, device_type="gpu", dtype=jnp.bfloat16, policy=policy)'
    )


def test_bfloat16_is_no_cure_for_too_few_digits():
    def fn(x):
        return x.astype(jnp.float16).astype(jnp.float32) - 1000.0

    rng = np.random.default_rng(0)
    diagnosis = diagnose(fn)(np.float32(1000 + 3 * rng.standard_normal(256)))
    assert {finding.kind for finding in diagnosis.findings} == {"precision"}
    (suggestion,) = diagnosis.suggestions
    assert not suggestion.cured
    assert "bfloat16" not in suggestion.code


def test_an_infinity_that_is_meant_does_not_hide_a_fault():
    def fn(w, x):
        seen = jnp.tril(jnp.ones((8, 8), bool))
        return mean(square(x @ w)), jnp.where(seen, x @ w, -jnp.inf)

    diagnosis = diagnose(fn, loss_scale=1.0, has_aux=True)(EYE, X)
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.operation) == ("overflow", "mul")
    assert diagnosis.suggestions[0].cured
    assert "square" in diagnosis.suggestions[0].code


def test_a_gradient_that_is_not_finite_in_float32_is_told_beside_an_overflow():
    def fn(w, bias):
        return mean(square(w @ (300 * EYE))) + jnp.sum(jnp.sqrt(bias))

    diagnosis = diagnose(fn, loss_scale=1.0, argnums=(0, 1))(X, np.zeros(3, "f"))
    assert {finding.kind for finding in diagnosis.findings} == {"float32", "overflow"}


def test_a_gradient_beyond_the_histogram_has_no_scale_window():
    def fn(w):
        return jnp.mean(w @ EYE)

    assert diagnose(fn, loss_scale=1.0)(X).scale_window
    assert diagnose(fn, loss_scale=2.0**-70)(X).scale_window is None
    assert diagnose(fn, loss_scale=2.0**80)(X).scale_window is None


def test_the_loss_scale_suggested_is_not_below_one_without_need():
    def fn(w, x):
        return 1e4 * jnp.mean((x @ w).astype(jnp.float32))

    diagnosis = diagnose(fn, loss_scale=2.0**20)(EYE, X / 300)
    low, high = diagnosis.scale_window
    assert low * high < 1 <= high / 4
    assert diagnosis.suggestions[0].loss_scale == high / 4


def test_the_scales_that_fit_are_said_to_be_those_before_another_change():
    def fn(w):
        return mean(square(w @ EYE))

    text = str(diagnose(fn, loss_scale=4.0)(X))
    assert "\nbefore the change, loss scales that fit: " in text
    text = str(diagnose(lambda w: jnp.mean(w @ EYE), loss_scale=4.0)(X))
    assert "\nloss scales that fit: " in text


def test_a_loss_scale_that_does_not_fit_is_told():
    def fn(w, x):
        return 1e-7 * jnp.mean((x @ w).astype(jnp.float32) ** 2)

    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((2, 32, 32)).astype(np.float32)
    diagnosis = diagnose(fn, loss_scale=64.0)(w, x)
    low, _ = diagnosis.scale_window
    assert diagnosis.healthy
    assert low > 64
    assert f"healthy, but loss scale 64 is below those that fit ({low:g} to " in str(
        diagnosis
    )


def test_a_rule_for_every_matmul_says_that_none_is_left():
    diagnosis = diagnose(lambda x: jnp.mean(x @ (1000 * EYE)))(X)
    (suggestion,) = diagnosis.suggestions
    assert '"dot_general"' in suggestion.code
    assert "no matmul is then left in 16 bits" in suggestion.reason


def test_a_cast_of_what_the_line_takes_goes_before_a_rule_that_reaches_further():
    def fn(x, cast=lambda h: h):
        h = cast(x @ EYE)
        a, b, c = h * 0.5, h * 0.25, h * 0.125
        d = jnp.tanh((a * b / 300).astype(jnp.float32))
        return mean(h * h) + jnp.mean(c) + jnp.mean(d)

    (suggestion,) = diagnose(fn)(X).suggestions
    line = fn.__code__.co_firstlineno + 4
    place = f"{Path(__file__).name}:{line}"
    assert suggestion.code == f".astype(jnp.float32)  # of what {place} takes"
    assert diagnose(lambda x: fn(x, lambda h: h.astype(jnp.float32)))(X).healthy


def test_a_line_that_holds_a_product_is_cured_by_a_region_around_it():
    def fn(x):
        energy = (x @ EYE) @ (EYE @ x.T)
        return 1e-6 * jnp.mean(energy) + jnp.mean(jnp.tanh(x @ EYE) @ EYE)

    (suggestion,) = diagnose(fn)(X).suggestions
    assert suggestion.code.startswith("with jamp.autocast(enabled=False):")


@pytest.mark.parametrize("first", ["rms_0", "rms"], ids=["flax", "haiku"])
def test_a_cure_for_one_of_several_modules_offers_the_rule_for_all(first):
    def fn(gains, x):
        for i in range(3):
            with jax.named_scope(f"rms_{i}" if i else first):
                h = gains[i] * x
                x = x / jnp.sqrt(1e-6 + (h * h) @ EYE / gains[i] ** 2)
        return x

    diagnosis = diagnose(fn)(jnp.array([1.0, 300.0, 1.0]), jnp.abs(X) / 30)
    (suggestion,) = diagnosis.suggestions
    rule, every, _ = suggestion.code.splitlines()
    assert rule.endswith('.scoped("rms_1", "float32")')
    rules = every.removeprefix("# or for all 3 alike: ")
    assert rules.endswith('.scoped("**/rms_*", "float32")')
    healthy = f'jamp.Policy.load("gpu"){rules}'
    policy = eval(healthy, {"jamp": jamp})
    report = jamp.explain(fn, device_type="gpu", policy=policy)(np.ones(3), X)
    assert report.low_matmuls == 0


def test_changes_that_only_help_together_are_told_as_one():
    def fn(x):
        h = x @ EYE
        h = (h + h * h) * 2**-8
        h = h @ EYE
        return jnp.sum((h + h * h) @ EYE)

    diagnosis = diagnose(fn)(X)
    assert len(diagnosis.suggestions) == 2
    text = diagnosis.text()
    assert "all of these (with all, ran again: healthy):" in text
    assert text.count("ran again") == 1
