"""An extension of griffe: a class whose arguments are those of `__new__` shows them."""

from typing import Any

from griffe import Class, Extension


class ArgumentsOfNew(Extension):
    """Takes `__new__` for `__init__` where a class has the one and not the other."""

    def on_class_members(self, *, cls: Class, **arguments: Any) -> None:
        del arguments
        if "__new__" in cls.members and "__init__" not in cls.members:
            cls.set_member("__init__", cls.members["__new__"])
