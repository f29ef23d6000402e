"""A wrapper around a class of optimizers, as a class: for frameworks that build the optimizer."""

import copyreg
import functools
import inspect
from typing import Any


class ClassForm(type):
    """The metaclass of class forms. They have no importable name, so pickle builds them again."""


def _reduce(made: Any) -> Any:
    return (class_form, made._form) if "_form" in vars(made) else made.__qualname__


copyreg.pickle(ClassForm, _reduce)


@functools.cache  # one class for one form, so that pickles keep their class
def class_form(cls: Any, base_class: Any, options: tuple[tuple[str, Any], ...]) -> Any:
    """Return the class of `cls(base_class(...), **options)`, with base_class a class of optimizers.

    The arguments are those of the base class. Its default weight decay, if any, is replaced by 0,
    also in the signature, because frameworks read the defaults there and pass them.
    """
    arguments = inspect.signature(base_class.__init__).parameters.values()
    ours = [a.replace(default=0.0) if a.name == "weight_decay" else a for a in arguments]
    signature = inspect.Signature(ours)

    @functools.wraps(base_class.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        cls.__init__(self, base_class(*given.args[1:], **given.kwargs), **dict(options))

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    made: Any = ClassForm(f"{cls.__name__}_{base_class.__name__}", (cls,), {"__init__": __init__})
    made.__doc__ = f"{cls.__name__} around {base_class.__name__}."
    made._form = cls, base_class, options
    return made
