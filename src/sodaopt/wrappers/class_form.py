"""Wrappers around a class, such as SODAWrapper.of(AdamW), for frameworks that build optimizers."""

import copyreg
import functools
import inspect
from typing import Any


class ClassForm(type):
    """The metaclass of the classes that `class_form` makes. Pickle cannot import them by a name."""


def _reduce(made: Any) -> Any:
    """Pickle a class as a call of `class_form`, and a subclass of such a class by its name."""
    return (class_form, made._form) if "_form" in vars(made) else made.__qualname__


copyreg.pickle(ClassForm, _reduce)


@functools.cache  # an optimizer that is unpickled has the same class as before
def class_form(cls: Any, base_class: Any, options: tuple[tuple[str, Any], ...]) -> Any:
    """Return a class whose objects are `cls(base_class(...), **options)`.

    Its constructor has the arguments of base_class. A default weight decay is replaced by 0. The
    signature says so too, because frameworks read the defaults there and pass them.

    cls: a class of wrappers.
    base_class: a class of optimizers.
    options: the keyword arguments of cls, as pairs.
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
