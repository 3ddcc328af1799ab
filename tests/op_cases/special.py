"""Special functions: errors, gammas, Bessel functions, and terms of logarithms."""

import jax.scipy.special as jsp

from ._case import OpCase, normal, positive, unit

_X = (normal(4, 8),)
_POSITIVE = (positive(4, 8),)
_UNIT = (unit(4, 8),)
_TERMS = (unit(4, 8), positive(4, 8))
_GAMMAS = (positive(4, 8), positive(4, 8))

_ERRORS = (
    OpCase("erf", jsp.erf, _X, "jax.scipy.special.erf(x)"),
    OpCase("erfc", jsp.erfc, _X, "jax.scipy.special.erfc(x)"),
    OpCase("erfinv", jsp.erfinv, _UNIT, "jax.scipy.special.erfinv(x)"),
    OpCase(
        "special_ndtr", jsp.ndtr, _X, "jax.scipy.special.ndtr(x)", traces_16bit=False
    ),
    OpCase(
        "special_ndtri",
        jsp.ndtri,
        _UNIT,
        "jax.scipy.special.ndtri(x)",
        traces_16bit=False,
    ),
    OpCase(
        "special_log_ndtr",
        jsp.log_ndtr,
        _X,
        "jax.scipy.special.log_ndtr(x)",
        traces_16bit=False,
    ),
)

_LOGARITHMS = (
    OpCase("logit", jsp.logit, _UNIT, "jax.scipy.special.logit(x)"),
    OpCase("xlogy", jsp.xlogy, _TERMS, "jax.scipy.special.xlogy(x, y)"),
    OpCase("special_xlog1py", jsp.xlog1py, _TERMS, "jax.scipy.special.xlog1py(x, y)"),
    OpCase("special_entr", jsp.entr, _UNIT, "jax.scipy.special.entr(x)"),
)

_GAMMA = (
    OpCase("lgamma", jsp.gammaln, _POSITIVE, "jax.scipy.special.gammaln(x)"),
    OpCase("digamma", jsp.digamma, _POSITIVE, "jax.scipy.special.digamma(x)"),
    OpCase(
        "polygamma",
        lambda x: jsp.polygamma(1, x),
        _POSITIVE,
        "jax.scipy.special.polygamma(1, x)",
    ),
    OpCase(
        "mvlgamma",
        lambda x: jsp.multigammaln(x + 1, 2),
        _POSITIVE,
        "jax.scipy.special.multigammaln(x, 2)",
    ),
    OpCase(
        "special_gammainc", jsp.gammainc, _GAMMAS, "jax.scipy.special.gammainc(a, x)"
    ),
    OpCase(
        "special_gammaincc", jsp.gammaincc, _GAMMAS, "jax.scipy.special.gammaincc(a, x)"
    ),
    OpCase(
        "special_zeta",
        lambda x, q: jsp.zeta(x + 2, q),
        _GAMMAS,
        "jax.scipy.special.zeta(x, q)",
    ),
)

_BESSEL = (
    OpCase("i0", jsp.i0, _X, "jax.scipy.special.i0(x)"),
    OpCase("special_i0e", jsp.i0e, _X, "jax.scipy.special.i0e(x)"),
    OpCase("special_i1", jsp.i1, _X, "jax.scipy.special.i1(x)"),
    OpCase("special_i1e", jsp.i1e, _X, "jax.scipy.special.i1e(x)"),
)

CASES = (*_ERRORS, *_LOGARITHMS, *_GAMMA, *_BESSEL)
