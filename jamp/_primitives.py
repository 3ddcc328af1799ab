"""Names of JAX's primitives, by what they do, as several modules ask for them.

Other modules ask whether a primitive is in one of these sets, or is the one that they
have a case for. Which rule holds for a primitive is in the tables of policies.
"""


def _names(*words: str) -> frozenset[str]:
    return frozenset(" ".join(words).split())


# Matmuls and convolutions.
PRODUCTS = _names("conv_general_dilated dot_general ragged_dot_general")
SCATTERS = _names("scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub")
# They keep the largest, or the smallest, of what they write to a place.
EXTREMES = _names("scatter-max scatter-min")
# Elementwise, and more than a few instructions for each element.
TRANSCENDENTAL = _names(
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp",
    "exp2 expm1 lgamma log log1p logistic pow sin sinh tan tanh",
)
COMPARISONS = _names("eq ge gt le lt ne")
LOGICAL = _names("and not or xor")
ARITHMETIC = _names(
    "abs add add_any ceil clamp div floor integer_pow max min mul neg one_minus_square",
    "rem round rsqrt select_n sign sqrt square sub",
)
# Where their operand hardly changes, their result leaps to another whole number.
STEPS = _names("ceil floor rem round")
# Their results have the dtype of their operands; of select_n, of all but the first.
OF_ONE_DTYPE = TRANSCENDENTAL | ARITHMETIC
# Elementwise, and dimensions of size one, and scalars, are broadcast.
BROADCASTING = _names("add atan2 div max min mul pow rem sub")
# Their results are rounded, also where an operand is a constant.
ROUNDING = BROADCASTING - _names("max min")
# They scale or shift an operand, if the other is a constant.
SHIFTING = _names("add sub")
SCALING = SHIFTING | _names("div mul")
# They repeat the elements of their operand.
ENLARGING = _names("broadcast_in_dim broadcast_to tile")
# They add up, or multiply, what they take.
ADDING = _names(
    "psum psum_invariant reduce_scatter scatter-add scatter-mul scatter-sub"
)
# A loop adds up in them, if it goes round with what they take.
CARRYING = ADDING | _names("add add_any cumlogsumexp cumsum reduce_sum sub")
# Their gradient adds up.
REPEATING = ENLARGING | _names("dynamic_slice gather pbroadcast pvary")
# The gradients of elements in several of their windows add up.
POOLS = _names("reduce_window_max reduce_window_min")
REDUCTIONS = _names(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum",
    "reduce_xor",
)
# They add up elements of one operand, or products of two.
SUMS = PRODUCTS | _names("cumsum reduce_sum reduce_window_sum")
# They order numbers, or say which come first.
ORDERS = _names("approx_top_k argmax argmin sort top_k")
# They move, slice, repeat or cast one operand, and have one result: what is known of
# the operand, as that it is a probability, is known of it.
MOVEMENT = _names(
    "broadcast_in_dim broadcast_to convert_element_type copy name optimization_barrier",
    "reshape reshard rev sharding_constraint slice squeeze transpose",
    "with_memory_space_constraint",
)
# These and others that change no number but by a cast.
MOVING = MOVEMENT | _names(
    "dynamic_slice dynamic_update_slice scatter split stack tile unstack"
)
# Their result is a view of their operand: the same buffer, in torch's words.
VIEWS = _names("broadcast_in_dim reshape squeeze transpose")
# The elements of their result are among those of their first operand: of constants, the
# numbers stay known.
KEEPING_ELEMENTS = (MOVEMENT - {"optimization_barrier"}) | _names(
    "dynamic_slice split stop_gradient tile unstack"
)
# Of an input of the program they make one still, whose gradient as a weight is float32.
ARRANGING = MOVING | _names("concatenate")
# Their results are probabilities: of one near 1, rounding leaves nothing of the rest.
PROBABILITIES = _names("logistic")
# A probability stays one, if the others are constants or are put beside it.
KEEPING_PROBABILITY = ARRANGING | _names(
    "add clamp gather max min mul neg pad select_n stop_gradient sub"
)
# Over devices.
COLLECTIVES = _names(
    "all_gather all_gather_invariant all_to_all pbroadcast pmax pmin ppermute psum",
    "psum_invariant pvary reduce_scatter",
)
# Their operands need not agree in dtype: each result is of one of them.
INDEPENDENT = COLLECTIVES | ORDERS | _names("device_put optimization_barrier")
# They hold no programs; of others that is found out.
PLAIN = OF_ONE_DTYPE | COMPARISONS | LOGICAL | PRODUCTS | REDUCTIONS | MOVEMENT
# They cost next to nothing to compute again beside reading what they are computed from.
CHEAP = (
    TRANSCENDENTAL
    | COMPARISONS
    | LOGICAL
    | ARITHMETIC
    | POOLS
    | (REDUCTIONS - _names("reduce_prod reduce_xor"))
    | _names(
        "bitcast_convert_type broadcast_in_dim concatenate convert_element_type",
        "custom_jvp_call gather iota is_finite jit pad reshape rev shift_left",
        "shift_right_arithmetic shift_right_logical slice split squeeze stack",
        "stop_gradient transpose unstack",
    )
)
# They have no 16-bit kernels. Of linear algebra some releases of JAX refuse 16-bit
# operands while a program is traced, others later; code around it asks for their
# dtype's eps.
FLOAT32_ONLY = _names(
    "cholesky complex eig eigh fft geqrf hessenberg householder_product lu ormqr qr",
    "schur svd triangular_solve tridiagonal tridiagonal_solve",
)
# Equations that only call one program, and the parameter that holds it.
CALLS = {
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "eval_jaxpr": "call_jaxpr",
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "remat_opt": "fwd_jaxpr",
}
# They join elements of several operands.
JOINING = _names("concatenate pad select_n stack")
# Their results are elements of their operands, but for the sign, or zero; none casts.
_REARRANGING = _names(
    "broadcast_in_dim concatenate copy dynamic_slice dynamic_update_slice gather jit",
    "neg pad reshape rev scatter sharding_constraint slice split squeeze stack",
    "stop_gradient tile transpose unstack",
)
# Their results are among the elements of their operands but for the sign, or -1, 0, 1.
EXACT = _REARRANGING | _names(
    "abs clamp cummax cummin custom_jvp_call max min reduce_max reduce_min select_n",
    "sign",
)
# What they make of a loop's sum is one still.
HANDING_ON = (
    (EXACT - _names("custom_jvp_call jit sign"))
    | (MOVEMENT - {"convert_element_type"})
    | (COLLECTIVES - ADDING)
    | EXTREMES
    | _names("approx_top_k device_put rem sort top_k")
)
# Each result is what they make of one operand, and adds up nothing.
EACH_BY_ITSELF = INDEPENDENT - CARRYING - REPEATING
# Their backward pass needs nothing of their operands.
LINEAR = _REARRANGING | _names("add add_any convert_element_type reduce_sum sub")
# They run in no other dtypes than those that they stand in.
DTYPE_BOUND = _names("bitcast_convert_type call_hi_primitive ffi_call pure_callback")
# Functions of one number, which are rounded once.
FUNCTIONS = _names("cos exp exp2 expm1 log log1p sin tan")
