"""Checkpoints of a traced program, in one form whatever JAX makes of them.

With `jax_remat3` they are high-level primitives, whose programs nothing shows and which
JAX cannot transpose where a rule for derivatives holds one. jamp plans them, and emits
them, as they are without that setting.
"""

from typing import Any

from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import name_p, remat_p

from jamp._compat import CheckpointName, RematTraced, is_plain_array


def as_checkpoint(eqn: JaxprEqn) -> Any:
    """An equation as it is without `jax_remat3`, if it is one of a checkpoint.

    A checkpoint that takes references needs the setting.
    """
    made: Any = eqn.params.get("_prim")
    if isinstance(made, CheckpointName):
        return eqn.replace(primitive=name_p, params={"name": made.name})
    if not isinstance(made, RematTraced) or eqn.effects:
        return eqn
    if not all(is_plain_array(var.aval) for var in (*eqn.invars, *eqn.outvars)):
        return eqn
    params = {
        "jaxpr": getattr(made.jaxpr, "jaxpr", made.jaxpr),
        "policy": made.policy,
        "prevent_cse": getattr(made, "prevent_cse", True),  # JAX 0.10 has no choice
        "differentiated": False,
    }
    return eqn.replace(primitive=remat_p, params=params)
