"""Errors in a function under autocast look as they do without it."""

import os
import re
import traceback
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jamp

X = jnp.ones((2, 3))
SCALE = jamp.GradScaler().init()


def fails(x):
    return (x @ jnp.ones(7)).sum()


def in_rule(x):
    function = jax.custom_jvp(jnp.tanh)
    function.defjvp(lambda primals, tangents: (function(*primals), fails(*tangents)))
    return function(x).sum()


def raised(fn, *args):
    with pytest.raises(Exception) as info:
        fn(*args)
    return info.value


def files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


CALLS = {
    "eager": (jamp.autocast(fails), X),
    "jitted": (jax.jit(jamp.autocast(fails)), X),
    "differentiated": (jax.grad(jamp.autocast(fails)), X),
    "scaled": (jamp.value_and_grad(jamp.autocast(fails)), SCALE, X),
    "in a rule": (jax.grad(jamp.autocast(in_rule)), X),
    "explained": (jamp.explain(fails), X),
    "diagnosed": (jamp.diagnose(fails), X),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_traceback_of_an_error_of_the_users_has_no_frames_of_jamp(call):
    error = raised(*call)
    jamps = os.path.dirname(jamp.__file__)
    found = files(error)
    assert __file__ in found
    assert not [name for name in found if name.startswith(jamps)], (
        "users would have to look for their own lines among jamp's"
    )


def concrete(params, batch, scale=1.0):
    if (batch["x"] @ params[0]["w"]).sum() * scale > 0:
        return batch["x"]
    return -batch["x"]


class Model:
    def __call__(self, params, batch):
        return concrete(params, batch)


PARAMS, BATCH = [{"w": jnp.ones(3)}], {"x": X}


def blamed(fn, *args, **kwargs):
    """The arguments that JAX says a value depends on."""
    message = str(raised(partial(fn, *args, **kwargs)))
    return re.search("depends on the values? of the arguments? (.*)", message)[1]


@pytest.mark.parametrize(
    ("fn", "args", "kwargs"),
    [
        (concrete, (PARAMS, BATCH), {}),
        (concrete, (PARAMS,), {"scale": X[0, 0], "batch": BATCH}),
        (partial(concrete, scale=2.0), (PARAMS, BATCH), {}),
        (Model(), (PARAMS, BATCH), {}),
        (Model().__call__, (PARAMS, BATCH), {}),
    ],
)
def test_errors_of_jax_name_arguments_as_without_autocast(fn, args, kwargs):
    found = blamed(jamp.autocast(fn), *args, **kwargs)
    assert found == blamed(jax.make_jaxpr(fn), *args, **kwargs)


def test_arguments_keep_their_names_beside_what_is_no_array():
    batch = {"name": "a picture", "x": X, "shape": (2, 3)}
    found = blamed(jamp.autocast(concrete), [*PARAMS, "a name"], batch, 2.0)
    assert found == "params[0]['w'] and batch['x']."
