"""Shapes in the package's signatures, checked while tests run: types by beartype, axes by jaxtyping. Functions that
name no shape are left to mypy.

jaxtyping has such a hook too. It reads the signature of every call anew and checks each argument twice, which made most
of what the proofs took. This one checks each argument and each result once, axes with axes of the same call as there.
It keeps what an annotation says of arrays of one shape, and checks the first calls of each function in each test.
"""

import ast
import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from beartype import BeartypeConf, beartype
from beartype._data.check.code.datacodename import ARG_NAME_FUNC
from jaxtyping import AbstractArray
from jaxtyping._storage import _shape_storage, pop_shape_memo, push_shape_memo

Checked = TypeVar("Checked")
CONFIGURATION = BeartypeConf(is_pep484_tower=True)
"""Ints are welcome where floats are asked for."""
NAME = "_checked_by_tests"
"""What `checked` is called within the package's modules; none of them may have a name like it."""
MOST = 8
"""Calls of each function that are checked in each test. A proof makes many thousands that are like the first ones."""
ARRAYS: set[type] = {torch.Tensor, torch.nn.Parameter, np.ndarray}
"""Classes of which one array fits an annotation as well as another of the same shape and dtype."""


def checked(given: Checked) -> Checked:
    """A function whose arguments and result are checked, or a dataclass whose fields are."""
    if inspect.isclass(given):
        if dataclasses.is_dataclass(given) and "__init__" in vars(given):
            given.__init__ = checked(given.__init__)
        return given
    if not any(map(_has_axes, given.__annotations__.values())):
        return given
    if "<locals>" not in given.__qualname__:
        return _first_calls(given, lambda: beartype(given, conf=CONFIGURATION))
    # It is made at every call of the function around it, so that all that are made count together.
    return _first_calls(given, lambda: _again(given)) if _COUNTS.setdefault(given.__code__, _Count()).more() else given


def _first_calls(given: FunctionType, strictly: Callable[[], Callable[..., object]]) -> Callable[..., object]:
    """A function whose first calls in each test are checked by what `strictly` makes of it, when it is first called."""
    counts, strict = _Count(), list[Callable[..., object]]()

    @functools.wraps(given)
    def first_calls(*args: object, **named: object) -> object:
        if not counts.more():
            return given(*args, **named)
        if not strict:
            strict.append(_in_one_call(strictly()))
        return strict[0](*args, **named)

    return first_calls


class _Count:
    """Calls of a function in a test."""

    __slots__ = ("left", "test")

    def __init__(self) -> None:
        self.left, self.test = MOST, _TEST[0]

    def more(self) -> bool:
        """Whether one more call is checked."""
        if self.test != _TEST[0]:
            self.left, self.test = MOST, _TEST[0]
        self.left -= 1
        return self.left >= 0


_TEST = [0]
"""The number of the test that runs."""
_COUNTS: dict[CodeType, _Count] = {}


def begin_test() -> None:
    """Check the first calls again."""
    _TEST[0] += 1


def _in_one_call(strict: Callable[..., object]) -> Callable[..., object]:
    """A checked function whose calls have sizes of axes of their own."""

    @functools.wraps(strict)
    def in_one_call(*args: object, **named: object) -> object:
        # This is `push_shape_memo`, written out because it runs at every call.
        try:
            stack = _shape_storage.memo_stack
        except AttributeError:
            stack = _shape_storage.memo_stack = []
        stack.append(({}, {}, {}, {}))
        try:
            return strict(*args, **named)
        finally:
            stack.pop()

    return in_one_call


_CHECKS: dict[CodeType, tuple[dict[str, object], FunctionType | None]] = {}
"""Annotations of functions within functions by their code, and what checks their arguments; None where nothing does."""


def _again(given: FunctionType) -> FunctionType:
    """What beartype makes of a function. A function within another is made at every call of that, and what checks its
    arguments is written once.
    """
    annotations, model = _CHECKS.get(given.__code__, (None, None))
    if annotations != given.__annotations__:
        written = dict(given.__annotations__)
        # With empty cells, so that nothing that one of the functions has seen is kept.
        cells = tuple(CellType() for _ in given.__closure__ or ())
        hollow = FunctionType(given.__code__, given.__globals__, given.__name__, closure=cells)
        functools.update_wrapper(hollow, given)
        del hollow.__wrapped__
        strict = beartype(hollow, conf=CONFIGURATION)
        model = None if strict is hollow else strict
        _CHECKS[given.__code__] = written, model
    if model is None:
        return given
    made = FunctionType(model.__code__, model.__globals__, model.__name__, model.__defaults__, model.__closure__)
    made.__kwdefaults__ = {**model.__kwdefaults__, ARG_NAME_FUNC: given}
    vars(made).update(vars(model))
    return functools.update_wrapper(made, given)


def _has_axes(annotation: object) -> bool:
    """Whether an annotation names axes, or something within it does."""
    if isinstance(annotation, list | tuple):
        return any(map(_has_axes, annotation))
    if inspect.isclass(annotation) and issubclass(annotation, AbstractArray):
        return True
    return any(map(_has_axes, get_args(annotation)))


Axes = tuple[dict[str, Any], dict[str, Any]]
"""Sizes by the names of axes: of single ones, and of several under one name."""


def _axes(annotation: type[AbstractArray], array: Any, read: Callable[[type, Any], bool]) -> Axes | bool | None:
    """The axes that an annotation names, in an array. False if no such array fits; None if that does not follow from
    the array alone.
    """
    special = ("elem", "broadcastable", "treepath")
    if any(getattr(axis, name, False) for axis in annotation.dims for name in special):
        return None
    singles, several, *_ = push_shape_memo({})
    try:
        return (singles, several) if read(annotation, array) else False
    finally:
        pop_shape_memo()


def _agree(own: dict[str, Any], sizes: dict[str, Any]) -> bool:
    """Whether axes have the sizes that other arrays of the call gave them, if any."""
    for name, size in own.items():  # noqa: SIM110 (a generator takes longer than the comparisons)
        if sizes.get(name, size) != size:
            return False
    return True


def _remember_shapes() -> None:
    """Let jaxtyping read an annotation once for each shape. By itself it reads it at every check."""
    read = type(AbstractArray).__instancecheck__
    known: dict[tuple[object, ...], Axes | bool | None] = {}

    def fits(annotation: type[AbstractArray], value: Any) -> bool:
        kind = type(value)
        if kind not in ARRAYS:
            return read(annotation, value)
        key = annotation, kind, value.dtype, value.shape
        try:
            found = known[key]
        except KeyError:
            found = known[key] = _axes(annotation, value, read)
        if not found:
            return found is None and read(annotation, value)
        singles, several = found
        try:
            sizes, shapes, *_ = _shape_storage.memo_stack[-1]
        except (AttributeError, IndexError):
            # Outside all calls there is nothing to agree with.
            return True
        if not (_agree(singles, sizes) and (not several or _agree(several, shapes))):
            return read(annotation, value)
        sizes.update(singles)
        if several:
            shapes.update(several)
        return True

    type(AbstractArray).__instancecheck__ = fits


def _remember_protocols() -> None:
    """Let Python 3.11 look for the members of a protocol in a class once, without calling properties, as later ones do.
    By itself it looks for all of them at every check.
    """
    if sys.version_info >= (3, 12):
        return
    members_of = typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)
    typing._is_callable_members_only = functools.cache(typing._is_callable_members_only)
    look = typing._ProtocolMeta.__instancecheck__

    @functools.cache
    def of_objects(protocol: type, kind: type) -> tuple[str, ...] | None:
        """Members that objects of a class must have themselves; None if Python must look."""
        if not (vars(protocol).get("_is_protocol") and getattr(protocol, "_is_runtime_protocol", False)):
            return None
        missing = tuple(name for name in members_of(protocol) if getattr(kind, name, None) is None)
        return None if any(callable(getattr(protocol, name, None)) for name in missing) else missing

    def has_members(protocol: type, value: object) -> bool:
        names = of_objects(protocol, type(value))
        return (names is not None and all(hasattr(value, name) for name in names)) or look(protocol, value)

    typing._ProtocolMeta.__instancecheck__ = has_members


def _decorate(block: ast.AST) -> None:
    """Put `checked` next to every function within a block of statements, and around every class."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for statement in getattr(block, field, ()):
            _decorate(statement)
            name = ast.copy_location(ast.Name(NAME, ast.Load()), statement)
            if isinstance(statement, ast.FunctionDef):
                statement.decorator_list.append(name)
            elif isinstance(statement, ast.ClassDef):
                statement.decorator_list.insert(0, name)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """From the source each time: what Python keeps of it is not decorated, and must not be."""
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        _decorate(tree)
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[NAME] = checked
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._package and not fullname.startswith(f"{self._package}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def check(*packages: str) -> None:
    """Check packages, all modules of which are imported later."""
    _remember_shapes()
    _remember_protocols()
    sys.meta_path[:0] = map(_Finder, packages)
