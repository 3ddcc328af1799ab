"""What goes wrong says what, where and what to do instead."""

import copy
import functools
import inspect
import pickle

import cloudpickle
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Primitive
from jax.extend.source_info_util import new_source_info
from jax.interpreters import batching, mlir

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")
x22 = jnp.ones((2, 2))


def location_of(fn, marker):
    """The file and line of this test's own code that holds a marker."""
    lines, start = inspect.getsourcelines(fn)
    (offset,) = [i for i, line in enumerate(lines) if line.rstrip().endswith(marker)]
    return f"{inspect.getsourcefile(fn)}:{start + offset}"


ARGUMENTS = {
    "unknown device": ({"device_type": "npu"}, jamp.AutocastError, "npu"),
    "capital letters": (
        {"device_type": "Cpu"},
        jamp.AutocastError,
        r"did you mean 'cpu'\?",
    ),
    "device object": ({"device_type": jax.devices()[0]}, jamp.AutocastTypeError, "str"),
    "float32": ({"dtype": jnp.float32}, jamp.AutocastError, "float32"),
    "float8": ({"dtype": jnp.float8_e4m3fn}, jamp.AutocastError, "float8"),
    "float64": ({"dtype": jnp.float64}, jamp.AutocastError, "got float64"),
    "NumPy's name for 16 bytes": ({"dtype": "f16"}, jamp.AutocastError, "got f16"),
    "integer": ({"dtype": jnp.int16}, jamp.AutocastError, "int16"),
    "no dtype": (
        {"dtype": "fp16"},
        jamp.AutocastTypeError,
        r"dtype must be float16 or bfloat16, got 'fp16'; did you mean 'float16'\?",
    ),
    "a dtype of torch's": (
        {"dtype": "torch.bfloat16"},
        jamp.AutocastTypeError,
        r"did you mean 'bfloat16'\?",
    ),
    "policy name": (
        {"policy": "gpu"},
        jamp.AutocastTypeError,
        r"as jamp.Policy.load\('gpu'\) reads .*, got 'gpu'",
    ),
    "a word for enabled": (
        {"enabled": "no"},
        jamp.AutocastTypeError,
        "enabled must be True or False, got 'no'",
    ),
    "a number for cache_enabled": (
        {"cache_enabled": 1},
        jamp.AutocastTypeError,
        "cache_enabled must be True or False, got 1",
    ),
    "no dtype of results": (
        {"output_dtype": "flot32"},
        jamp.AutocastTypeError,
        r"output_dtype must be a floating dtype, got 'flot32'; "
        r"did you mean 'float32'\?",
    ),
    "dtype of keys": (
        {"dtype": jax.dtypes.prng_key},
        jamp.AutocastTypeError,
        "dtype must be float16 or bfloat16, got",
    ),
    "results of keys": (
        {"output_dtype": jax.random.key(0).dtype},
        jamp.AutocastTypeError,
        r"output_dtype must be a floating dtype, got key<fry>",
    ),
    "unknown option": (
        {"dtpye": jnp.float16},
        jamp.AutocastTypeError,
        r"autocast takes device_type, .* and output_dtype, not dtpye; .* 'dtype'\?",
    ),
    "integer results": (
        {"output_dtype": jnp.int32},
        jamp.AutocastTypeError,
        "output_dtype must be a floating dtype, got int32",
    ),
}


@pytest.mark.parametrize("options, error, words", ARGUMENTS.values(), ids=ARGUMENTS)
def test_wrong_arguments_raise_where_they_are_written(options, error, words):
    with pytest.raises(error, match=words):
        jamp.autocast(**options)
    with pytest.raises(error, match=words):
        jamp.autocast(lambda x: x, **options)


def test_arguments_of_a_disabled_autocast_are_checked_too():
    with pytest.raises(jamp.AutocastError, match="npu"):
        jamp.autocast(device_type="npu", enabled=False)
    with pytest.raises(jamp.AutocastError, match="got int16"):
        jamp.autocast(dtype=jnp.int16, enabled=False)


@pytest.mark.parametrize("value", [x22, 3, "text", jamp.Policy.load("gpu")])
def test_autocast_of_what_is_no_function_raises(value):
    with pytest.raises(jamp.AutocastTypeError, match="function"):
        jamp.autocast(value)


@pytest.mark.parametrize("device_type", ["gpu", "cuda", "cpu"])
def test_a_device_type_in_the_place_of_the_function_raises(device_type):
    message = (
        rf"keyword: autocast\(fn, device_type='{device_type}'\), or "
        rf"@jamp.autocast\(device_type='{device_type}'\) above its def"
    )
    with pytest.raises(jamp.AutocastTypeError, match=message):
        jamp.autocast(device_type)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, np.dtype(jnp.bfloat16), np.float16, np.float32]
)
def test_a_dtype_in_the_place_of_the_function_raises(dtype):
    name = np.dtype(dtype).name
    message = rf"got the dtype {name}; .*: autocast\(dtype=jnp.{name}\)"
    with pytest.raises(jamp.AutocastTypeError, match=message):
        jamp.autocast(dtype)


def test_options_are_named():
    for unnamed in (lambda x: x, "cuda"), ("cuda", jnp.float16):
        with pytest.raises(jamp.AutocastTypeError, match="by name, as in autocast"):
            jamp.autocast(*unnamed)


def test_a_numpy_bool_is_a_flag():
    assert gpu(lambda x: x @ x, enabled=np.bool_(False))(x22).dtype == jnp.float32


@pytest.mark.parametrize("kind", [nnx.Linear, nn.Dense])
def test_autocast_of_a_class_raises_and_says_what_to_decorate(kind):
    message = rf"got the class {kind.__name__}; decorate its __call__ \(flax.nnx\) or "
    with pytest.raises(jamp.AutocastTypeError, match=message):
        jamp.autocast(dtype=jnp.bfloat16)(kind)


def test_autocast_of_what_has_an_apply_is_told_to_take_that():
    hk = pytest.importorskip("haiku")
    transformed = hk.transform(lambda x: hk.Linear(2)(x))
    with pytest.raises(jamp.AutocastTypeError, match="got Transformed; give its apply"):
        jamp.autocast(transformed)


def test_autocast_of_an_autocast_object_raises():
    with pytest.raises(jamp.AutocastTypeError, match="function"):
        jamp.autocast(jamp.autocast())


@pytest.mark.parametrize(
    "options", [{}, {"dtype": jnp.float16}, {"device_type": "gpu"}]
)
def test_an_enabling_region_outside_autocast_raises_and_says_what_to_do(options):
    with pytest.raises(jamp.AutocastError, match=r"[Ww]rap the function"):
        with jamp.autocast(**options):
            pass
    assert not jamp.is_autocast_enabled()


def test_every_error_is_a_jamp_error_and_a_builtin_one():
    kinds = {
        jamp.AutocastError: ValueError,
        jamp.AutocastTypeError: TypeError,
        jamp.PolicyError: ValueError,
        jamp.BannedOpError: RuntimeError,
    }
    for error, builtin in kinds.items():
        assert issubclass(error, jamp.JampError)
        assert issubclass(error, builtin)


def test_a_banned_function_names_the_users_line_and_the_way_out():
    def fn(x):
        y = x @ x
        return jax.nn.gelu(y)  # unsafe

    policy = jamp.Policy.load("gpu").with_rules(banned=[jax.nn.gelu])
    with pytest.raises(jamp.BannedOpError) as error:
        jamp.autocast(fn, policy=policy)(x22)
    message = str(error.value)
    assert location_of(fn, "# unsafe") in message
    assert "gelu" in message
    assert "enabled=False" in message


@pytest.mark.parametrize(
    ("flag", "fn"),
    [
        ("jax_debug_nans", jnp.log),
        ("jax_debug_nans", jax.jit(lambda x: 2 * jnp.log(x))),
        ("jax_debug_nans", jax.checkpoint(lambda x: 2 * jax.jit(jnp.log)(x))),
        ("jax_debug_nans", lambda x: jax.jit(jnp.log)(x * jnp.dot(x, x)).mean()),
        ("jax_debug_infs", lambda x: 1 / (x - x)),
    ],
)
def test_flags_of_jax_that_look_for_nan_and_inf_find_it(flag, fn):
    wrapped, x = gpu(fn), -jnp.ones(3)
    assert not np.isfinite(wrapped(x)).any()
    with getattr(jax, flag.removeprefix("jax_"))(True):
        for run in (wrapped, jax.jit(wrapped)):
            with pytest.raises(FloatingPointError, match=r"encountered in (log|div)"):
                run(x)


@pytest.mark.parametrize("reduce", [jnp.var, jnp.median])
@pytest.mark.parametrize(
    "transform",
    [lambda fn: fn, jax.jit, jax.vmap, lambda fn: jax.grad(lambda x: fn(x).sum())],
    ids=["eager", "jit", "vmap", "grad"],
)
def test_a_nan_that_where_leaves_out_is_no_error_where_jax_looks_for_nan(
    transform, reduce
):
    wrapped = transform(gpu(lambda x: reduce(x * 2)))
    expected = wrapped(x22)
    with jax.debug_nans(True):
        np.testing.assert_array_equal(wrapped(x22), expected)


OUTSIDE = [classmethod, staticmethod, property, functools.cached_property]


@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_decorator_that_goes_outside_is_named(kind):
    message = f"put @{kind.__name__} above @jamp.autocast"
    with pytest.raises(jamp.AutocastTypeError, match=message):
        jamp.autocast(kind(lambda self: 1))


mystery_p = Primitive("mystery")
mystery_p.def_impl(lambda x: 2 * x)
mystery_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(
    mystery_p, mlir.lower_fun(lambda x: 2 * x, multiple_results=False)
)
batching.defvectorized(mystery_p)


def test_an_unknown_primitive_runs_as_traced_and_is_reported():
    fn = lambda x: mystery_p.bind(x @ x)  # noqa: E731
    result = gpu(fn)(x22)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, 4 * x22)
    np.testing.assert_array_equal(jax.jit(gpu(fn))(x22), 4 * x22)
    report = jamp.explain(fn, device_type="gpu")(x22)
    assert [record.primitive for record in report.unknown] == ["mystery"]
    assert "mystery (1)" in str(report)


def test_an_unknown_primitive_stays_in_the_program_if_nothing_reads_it():
    def fn(x):
        mystery_p.bind(x)  # as a tag for whoever reads the program
        return x @ x

    program = jax.make_jaxpr(gpu(fn))(x22)
    assert [eqn.primitive.name for eqn in program.eqns].count("mystery") == 1


def test_a_program_without_tracebacks_warns_and_keeps_the_primitive_rules():
    (call,) = jax.make_jaxpr(jax.jit(lambda x: jax.nn.gelu(x @ x)))(x22).eqns
    program = call.params["jaxpr"]
    bare = program.jaxpr.replace(
        eqns=[eqn.replace(source_info=new_source_info()) for eqn in program.eqns]
    )
    params = {**call.params, "jaxpr": ClosedJaxpr(bare, program.consts)}

    def fn(x):
        return call.primitive.bind(x, **params)[0]

    with pytest.warns(jamp.JampWarning, match="tracebacks") as caught:
        result = gpu(fn)(x22)
    assert [warned.filename for warned in caught] == [__file__]
    # By the rules of primitives its cube is float32; gelu as a function is float16.
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, jax.nn.gelu(x22 @ x22), rtol=1e-3)


TRANSFORMS = [jamp.explain, jamp.diagnose, jamp.value_and_grad]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda fn: fn.__name__)
def test_inputs_given_beside_a_function_are_told_where_they_go(transform):
    name = transform.__name__
    message = rf"inputs go to what it returns: {name}\(fn\)\(\.\.\.\)"
    with pytest.raises(jamp.AutocastTypeError, match=message):
        transform(jnp.matmul, x22, x22, x22)
    with pytest.raises(jamp.AutocastTypeError, match=f"{name} takes a function, got"):
        transform(3)


@pytest.mark.parametrize(
    "decorator, ending",
    [
        (jamp.custom_fwd, r"cast_inputs is a keyword: custom_fwd\(cast_inputs=jnp\."),
        (jamp.custom_bwd, r"cast_inputs is a keyword: custom_bwd\(cast_inputs=jnp\."),
        (jamp.explain, r"dtype is a keyword: explain\(dtype=jnp\.float32\)"),
        (jamp.value_and_grad, "got the dtype float32$"),
    ],
)
def test_a_dtype_in_the_place_of_a_function_is_told_its_keyword(decorator, ending):
    with pytest.raises(jamp.AutocastTypeError, match=ending):
        decorator(jnp.float32)


@pytest.mark.parametrize("decorator", [jamp.custom_fwd, jamp.custom_bwd])
def test_a_decorator_with_options_names_itself(decorator):
    message = f"{decorator.__name__} takes a function"
    with pytest.raises(jamp.AutocastTypeError, match=message):
        decorator(cast_inputs=jnp.float32)(3)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_region_takes_no_dtype_of_results(enabled):
    def fn(x):
        with jamp.autocast(enabled=enabled, output_dtype=jnp.float32):
            return x @ x

    with pytest.raises(jamp.AutocastTypeError, match="which a region has none of"):
        gpu(fn)(x22)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: np.sin(x),
        lambda x: [x] * int(x.sum()),
        lambda x: x[x > 0],
        lambda x: x + jnp.zeros(x.sum().astype(int)),
        lambda x: x.block_until_ready(),
    ],
)
def test_what_jax_refuses_to_trace_is_told_who_traces(fn):
    with pytest.raises((TypeError, IndexError, AttributeError)) as caught:
        gpu(lambda x: gpu(fn)(x @ x))(x22)
    notes = "".join(caught.value.__notes__)
    assert notes.count("jamp.autocast traces the function as jax.jit does") == 1


def test_a_linen_module_without_parameters_names_its_apply():
    with pytest.raises(jamp.AutocastTypeError, match=r"autocast\(model\.apply\)"):
        jamp.autocast(nn.Dense(3))(x22)


def test_autocast_is_itself_wherever_it_is_copied_to():
    for copied in (copy.deepcopy(jamp.autocast), pickled(jamp.autocast)):
        assert copied is jamp.autocast
    assert inspect.signature(jamp.autocast).parameters["dtype"].default is None


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_a_region_does_what_the_region_does(copied):
    region = jamp.autocast(dtype=jnp.bfloat16)
    inside = copied(region)

    def fn(x):
        with region, copied(region):
            y = x @ x
        with inside:
            return y, x @ x

    assert [y.dtype for y in gpu(fn)(x22)] == [jnp.bfloat16] * 2
    widened = copied(jamp.autocast(device_type="gpu", output_dtype=jnp.float32))
    assert widened(jnp.matmul)(x22, x22).dtype == jnp.float32


@pytest.mark.parametrize("called", [False, True])
def test_cloudpickle_takes_a_function_under_autocast(called):
    scale = jnp.float32(3)
    fn = gpu(lambda x: x @ x * scale)
    if called:
        fn(x22)
    copied = pickle.loads(cloudpickle.dumps(fn))
    np.testing.assert_array_equal(copied(x22), fn(x22))
    assert copied(x22).dtype == jnp.float16
