"""Casts of one equation: made once, shared, and noted in its record."""

from jamp import _dtypes
from jamp._dtypes import DType
from jamp._plan.plan import Cast, Plan
from jamp._plan.records import Conversion, Record
from jamp._plan.values import Value
from jamp._tracing.regions import Options


class Caster:
    """Plans the casts of one equation.

    Attributes:
      record: the equation's record.
      options: the options in force.
      plan: takes the casts.
    """

    def __init__(self, record: Record, options: Options, plan: Plan):
        self.record = record
        self.options = options
        self.plan = plan

    def cast(self, value: Value, dtype: DType) -> Value:
        """The value in a dtype; cast once and shared, if sharing is on."""
        if value.dtype == dtype:
            return value
        self.plan.changed = True
        if value.constant is not None:
            return value.constant_in(dtype)
        if dtype in value.casts:
            return value.casts[dtype]
        share = self.options.cache_enabled
        narrows = dtype.itemsize < value.dtype.itemsize
        if share and narrows and value.slot is not None:
            # The caller casts it, once for all that it is handed to.
            result = self._target(value, dtype)
            self.plan.extras[value.slot, dtype] = result
        else:
            self.note(value, dtype)
            result = value.prepared.get(dtype) or self._target(value, dtype)
            if dtype not in value.prepared:
                self.plan.add(Cast((value,), (result,)))
        if share:
            value.casts[dtype] = result
            if not narrows:
                # Only the way back from a wider dtype loses nothing.
                result.casts[value.dtype] = value
        return result

    def _target(self, value: Value, dtype: DType) -> Value:
        traits = value.traits
        if traits.probability and dtype in _dtypes.LOW_DTYPES:
            traits = traits._replace(rounded=dtype)
        return Value.of(value.aval, dtype, traits)

    def note(self, value: Value, dtype: DType) -> None:
        """Notes a cast, also where what takes the value makes it itself."""
        self.plan.changed = True
        self.record.casts.append(Conversion(value.dtype, dtype, value.aval.shape))
