"""The identity of a scorer: digests of its code and of the values that the code reads, by part.

A run notes them when it begins, and goes on with a scorer whose parts are equal. They depend on no path, line number,
comment or name of the scorer itself, and are the same in every process of one version of Python. The scorer of a file
is known by the source of that file and of the modules that it imports; an object by its code objects, defaults,
closure, arguments and attributes, and by those of the functions and classes that its code reads. Code of the standard
library and of installed packages is known by its name alone.
"""

import ast
import dis
import functools
import hashlib
import importlib.util
import math
import os
import re
import site
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    NotImplementedType,
    WrapperDescriptorType,
)
from typing import Any

MOST_PARTS = 2000
"""Parts of a scorer that are compared, at most."""
MOST_VALUES = 1_000_000
"""Values of one part that are compared, at most."""


@dataclass(frozen=True)
class Identity:
    """The identity of a scorer.

    Attributes:
        parts: name of a part, such as "its code" or "global LEXICON" -> its SHA-256, in hexadecimal.
        unknown: name of a part that is not compared -> the reason.
    """

    parts: Mapping[str, str]
    unknown: Mapping[str, str]

    def settled(self, later: "Identity") -> "Identity":
        """Returns the identity without the parts that differ `later`, after calls: they are state, not the scorer."""
        changed = _differing(self.parts, later.parts)
        parts = {name: digest for name, digest in self.parts.items() if name not in changed}
        return Identity(parts, {**self.unknown, **dict.fromkeys(changed, "its calls change it")})

    def to_json(self) -> dict[str, Any]:
        """Returns JSON, for the header of a log."""
        return {"parts": dict(self.parts), "unknown": dict(self.unknown)}


def difference(before: object, now: object) -> str | None:
    """Returns the name of the first part in which two identities differ, each by `to_json`; None: they are the same.

    Parts that `before` says are not compared are passed over. What is no identity has no part, and "all of it" differs.
    """
    if before is None and now is None:
        return None
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return "all of it"
    parts, others, unknown = before.get("parts"), now.get("parts"), before.get("unknown")
    if not isinstance(parts, Mapping) or not isinstance(others, Mapping) or not isinstance(unknown, Mapping):
        return "all of it"
    return next((name for name in _differing(parts, others) if name not in unknown), None)


def _differing(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    return [name for name in {**left, **right} if left.get(name) != right.get(name)]


def identity_of_file(path: Path, function: str) -> Identity:
    """Returns the identity of a function in a Python file that has been imported: its source, without comments."""
    parts = {"its function": _digest(function), "its file": _source_digest(path)}
    return Identity({**parts, **dict(_modules_of(path, ""))}, {})


def identity_of(scorer: Any) -> Identity:
    """Returns the identity of a scorer that is an object, or of several in a tuple."""
    reader = _Reader()
    reader.read(scorer)
    return Identity(reader.parts, reader.unknown)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


# Source


def _source_digest(path: Path) -> str:
    """Returns the digest of a Python file without its comments and docstrings; of its bytes where it is no such."""
    data = path.read_bytes()
    try:
        tree = ast.parse(data)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [each for each in body if not _is_text(each)] or [ast.Pass()]  # type: ignore[attr-defined]
        return _digest(ast.unparse(tree))
    except (SyntaxError, ValueError, RecursionError):
        return hashlib.sha256(data).hexdigest()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _modules_of(path: Path, package: str, seen: set[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yields (part, digest) of each module of the user's that a Python file imports, and of those they import."""
    seen = set() if seen is None else seen
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    for name in _imported(tree, package):
        if name not in seen:
            seen.add(name)
            yield from _of_module(name, seen)


def _of_module(name: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    spec = _spec_of(name)
    if spec is None or spec.origin is None or _is_installed_file(spec.origin) or not Path(spec.origin).is_file():
        return
    path = Path(spec.origin)
    if path.suffix != ".py":
        yield f"module {name}", hashlib.sha256(path.read_bytes()).hexdigest()
        return
    yield f"module {name}", _source_digest(path)
    yield from _modules_of(path, name if spec.submodule_search_locations is not None else name.rpartition(".")[0], seen)


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Yields the names of modules that a source imports; of `from a import b` both a and a.b, which may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
                base = ".".join([*above, *([base] if base else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _spec_of(name: str) -> ModuleSpec | None:
    """Returns where a module is found; None where it is not."""
    try:
        return importlib.util.find_spec(name)
    except Exception:  # a.b of an a that is no package, or whose code raises; a module made by hand
        return None


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    """Returns the folders of the standard library, of installed packages and of this library."""
    paths = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    found = [*paths, *site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])]
    return tuple(os.path.realpath(path) + os.sep for path in found)


def _is_installed_file(file: str) -> bool:
    if not Path(file).is_absolute():  # no file: "built-in", or the name of a cell of a notebook
        return file in ("built-in", "frozen")
    return os.path.realpath(file).startswith(_installed_folders())


def _is_installed(module: str | None) -> bool:
    """Whether a module, by its name, is of the standard library, of an installed package or of this library."""
    loaded = sys.modules.get(module or "")
    if loaded is None or module == "__main__":  # made by hand, or a script or notebook
        return module in sys.builtin_module_names
    file = getattr(loaded, "__file__", None)
    return _is_installed_file(file) if isinstance(file, str) else getattr(loaded, "__spec__", None) is not None


# Objects


class _UnknownError(Exception):
    """A value that cannot be compared; the message has the reason."""


_PLAIN = (type(None), bool, float, complex, str, bytes, bytearray, range, slice, EllipsisType, NotImplementedType)
_OF_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_SLOTS = (MemberDescriptorType, GetSetDescriptorType)
_READS = ("LOAD_GLOBAL", "LOAD_NAME")
_MEMBERS = ("LOAD_ATTR", "LOAD_METHOD")
_MADE = ("_abc_impl",)
"""Attributes of classes that Python makes, and that are no part of what they compute."""


class _Reader:
    """Reads the parts of a scorer: each function, class and object that is reached has parts, once.

    Attributes:
        parts: see `Identity`.
        unknown: see `Identity`.
    """

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []  # so that no other object gets the id of one that was read
        self._left: deque[Callable[[], None]] = deque()
        self._globals: dict[str, tuple[int, str]] = {}
        self._values = 0

    def read(self, scorer: Any) -> None:
        """Reads a scorer and all that it reaches."""
        self.parts["Python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
        for number, each in enumerate(scorer if isinstance(scorer, tuple) else (scorer,)):
            name = "" if not isinstance(scorer, tuple) else f"scorer {number + 1}"
            inner = each
            while isinstance(getattr(inner, "__wrapped__", None), FunctionType) and not isinstance(inner, FunctionType):
                inner = inner.__wrapped__
            if isinstance(inner, FunctionType):  # one of an installed package too
                self._enter(inner, name, self._function)
            elif isinstance(inner, _OF_C):
                self.unknown[_part("code", name)] = f"it is compiled: {_place(inner)}"
            elif isinstance(inner, MethodType):
                self._add(_part("object", name), inner.__self__)
                self._enter(inner.__func__, name, self._function)
            elif isinstance(inner, functools.partial) or not _is_installed(type(inner).__module__):
                self._enter(inner, name, self._object)
            else:
                self._add(_part("object", name), inner)
        while self._left:
            if len(self.parts) >= MOST_PARTS:
                self.unknown["the rest"] = f"it has more than {MOST_PARTS:,} parts"
                return
            self._left.popleft()()

    def _enter(self, value: Any, name: str, expand: Callable[[Any, str], None]) -> str:
        """Returns the name of what has parts, which are read later."""
        known = self._names.get(id(value))
        if known is not None:
            return known
        taken, unique, count = set(self._names.values()), name, 1
        while unique in taken:
            count += 1
            unique = f"{name} #{count}"
        self._names[id(value)] = unique
        self._kept.append(value)
        self._left.append(functools.partial(expand, value, unique))
        return unique

    def _add(self, part: str, value: Any) -> None:
        """Adds a part with the digest of a value."""
        self._values = 0
        try:
            self.parts[part] = _digest(self._text(value, ()))
        except _UnknownError as error:
            self.unknown[part] = str(error)
        except Exception as error:  # of a class of the user's, or one without an end
            self.unknown[part] = f"{_place(type(value))}, {type(error).__name__}"

    def _function(self, function: FunctionType, name: str) -> None:
        code = function.__code__
        self._add(_part("code", name), code)
        defaults = function.__defaults__ or ()
        named = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for parameter, value in [*zip(named, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]:
            self._add(_part(f"default {parameter}", name), value)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._add(_part(f"variable {variable}", name), value)
        for read in () if _is_installed_file(code.co_filename) else _reads(code):
            self._global(function.__globals__, read)
        for module in _imports_of(code):
            if not _is_installed(module):
                self.parts.update(_of_module(module, {module}))

    def _global(self, namespace: dict[str, Any], read: tuple[str, ...]) -> None:
        """Adds a global that code reads; of a module of the user's the attribute that is read."""
        first, *rest = read
        if first not in namespace or (first.startswith("__") and first.endswith("__")):
            return
        value, name = namespace[first], first
        while isinstance(value, ModuleType) and rest and not _is_installed(value.__name__):
            member, *rest = rest
            if member not in vars(value):
                return
            value, name = vars(value)[member], f"{name}.{member}"
        part = f"global {name}"
        count = 1
        key = (id(namespace), name)
        while self._globals.setdefault(part, key) != key:
            count += 1
            part = f"global {name} #{count}"
        if part not in self.parts and part not in self.unknown:
            self._add(part, value)

    def _class(self, cls: type, name: str) -> None:
        self._add(_part("bases", name), cls.__bases__)
        for attribute, value in vars(cls).items():
            hidden = attribute.startswith("__") and attribute.endswith("__") and not isinstance(value, FunctionType)
            if hidden or attribute in _MADE or isinstance(value, _SLOTS):
                continue
            self._add(_part(f"attribute {attribute}", name), value)

    def _object(self, value: Any, name: str) -> None:
        if isinstance(value, functools.partial):
            self._add(_part("function", name), value.func)
            for number, argument in enumerate(value.args):
                self._add(_part(f"argument {number + 1}", name), argument)
            for keyword, argument in value.keywords.items():
                self._add(_part(f"argument {keyword}", name), argument)
            return
        self._add(_part("class", name), type(value))
        each = _attributes(value)
        if each is None:
            self.unknown[_part("attributes", name)] = _place(type(value))
        for attribute, inner in sorted((each or {}).items()):
            self._add(_part(f"attribute {attribute}", name), inner)

    def _text(self, value: Any, above: tuple[int, ...]) -> str:
        """Returns a text that two values have in common where they are equal; `_UnknownError` where there is none."""
        self._values += 1
        if self._values > MOST_VALUES:
            raise _UnknownError(f"it has more than {MOST_VALUES:,} values")
        kind = type(value)
        if kind in _PLAIN:
            return f"{kind.__name__} {value!r}"
        if kind is int:
            return f"int {value:x}"
        if id(value) in above:
            return f"the one {len(above) - above.index(id(value))} above"
        inside = (*above, id(value))
        if isinstance(value, Enum):
            return f"{_place(kind)} {value.name} {self._text(value.value, inside)}"
        if isinstance(value, dict | MappingProxyType):
            pairs = (f"{self._text(key, inside)}: {self._text(each, inside)}" for key, each in value.items())
            return f"{self._class_text(kind)} {{{', '.join(sorted(pairs))}}}"
        if isinstance(value, set | frozenset):
            return f"{self._class_text(kind)} {{{', '.join(sorted(self._text(each, inside) for each in value))}}}"
        if isinstance(value, list | tuple | deque):
            return f"{self._class_text(kind)} [{', '.join(self._text(each, inside) for each in value)}]"
        if isinstance(value, CodeType):
            return self._code_text(value, inside)
        return self._object_text(value, inside)

    def _object_text(self, value: Any, inside: tuple[int, ...]) -> str:
        kind = type(value)
        if isinstance(value, type):
            return self._class_text(value)
        if isinstance(value, FunctionType):
            if _is_installed(value.__module__):
                return f"named {_place(value)}"
            return f"function {self._enter(value, value.__qualname__, self._function)}"
        if isinstance(value, MethodType):
            return f"method {self._text(value.__func__, inside)} of {self._text(value.__self__, inside)}"
        if isinstance(value, staticmethod | classmethod):
            return f"{kind.__name__} {self._text(value.__func__, inside)}"
        if isinstance(value, property):
            return f"property {self._text((value.fget, value.fset, value.fdel), inside)}"
        if isinstance(value, functools.cached_property):
            return f"cached_property {self._text(value.func, inside)}"
        if isinstance(value, _OF_C):
            owner = getattr(value, "__self__", None)
            of = "" if owner is None or isinstance(owner, ModuleType | type) else self._text(owner, inside)
            return f"named {_place(value)} {of}"
        if isinstance(value, ModuleType):
            if _is_installed(value.__name__):
                return f"module {value.__name__}"
            raise _UnknownError(f"the module {value.__name__}")
        if isinstance(value, re.Pattern):
            return f"pattern {value.pattern!r} {value.flags}"
        if isinstance(value, PurePath):
            return f"path {value}"
        if isinstance(value, functools.partial) or not _is_installed(kind.__module__):
            return f"object {self._enter(value, kind.__qualname__, self._object)}"
        if isinstance(getattr(value, "__wrapped__", None), FunctionType):  # as of functools.cache
            return f"{_place(kind)} {self._text(value.__wrapped__, inside)}"
        return self._library_text(value)

    def _library_text(self, value: Any) -> str:
        """Returns the text of an object of the standard library, or an array."""
        kind = type(value)
        if kind is object or kind.__module__ == "dataclasses":  # marks, which have no state
            return _place(kind)
        if kind.__module__ in _WITH_WHOLE_REPR:
            return f"{_place(kind)} {value!r}"
        if hasattr(value, "tolist") and hasattr(value, "dtype") and hasattr(value, "shape"):
            self._values += math.prod(value.shape)
            if self._values > MOST_VALUES:
                raise _UnknownError(f"{_place(kind)} of more than {MOST_VALUES:,} values")
            return f"{_place(kind)} {value.dtype} {tuple(value.shape)} {value.tolist()!r}"
        raise _UnknownError(_place(kind))

    def _class_text(self, cls: type) -> str:
        if _is_installed(cls.__module__):
            return _place(cls)
        return f"class {self._enter(cls, cls.__qualname__, self._class)}"

    def _code_text(self, code: CodeType, inside: tuple[int, ...]) -> str:
        """Returns what code computes: not its name, place or docstring, which no instruction loads."""
        loaded = {each.arg for each in dis.get_instructions(code) if each.opcode in dis.hasconst}
        constants = [self._text(each, inside) if i in loaded else "" for i, each in enumerate(code.co_consts)]
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_nlocals, code.co_flags)
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        names = (parameters, code.co_names, code.co_freevars, code.co_cellvars)
        return f"code {code.co_code!r} {constants} {counts} {names} {code.co_exceptiontable!r}"


_WITH_WHOLE_REPR = ("datetime", "decimal", "fractions", "uuid", "_decimal", "zoneinfo", "ipaddress")
"""Modules of the standard library whose objects are told apart by their repr."""


def _part(what: str, owner: str) -> str:
    return f"its {what}" if not owner else f"{what} of {owner}"


def _place(value: Any) -> str:
    """Returns module and qualified name of a class or function."""
    named = value if hasattr(value, "__qualname__") else type(value)
    module = getattr(named, "__module__", None) or getattr(getattr(named, "__objclass__", None), "__module__", None)
    return f"{module}.{named.__qualname__}" if module else str(named.__qualname__)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Returns the attributes that an object has of itself; None where it has no place for any that Python sees."""
    slots = {
        name: getattr(value, name)
        for cls in type(value).__mro__
        for name in _names_in(vars(cls).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    }
    if not slots and not hasattr(value, "__dict__"):
        return None
    return {**slots, **getattr(value, "__dict__", {})}


def _names_in(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yields a code object and those inside of it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _reads(code: CodeType) -> list[tuple[str, ...]]:
    """Returns the globals that code reads, each with the attributes that it reads of it next: ("helper", "score")."""
    found: dict[tuple[str, ...], None] = {}
    for each in _codes(code):
        chain: list[str] = []
        for instruction in dis.get_instructions(each):
            if chain and instruction.opname in _MEMBERS:
                chain.append(str(instruction.argval))
            elif instruction.opname != "EXTENDED_ARG":
                found |= {tuple(chain): None} if chain else {}
                chain = [str(instruction.argval)] if instruction.opname in _READS else []
    return list(found)


def _imports_of(code: CodeType) -> list[str]:
    """Returns the modules that code imports where it is called."""
    found = (each for inner in _codes(code) for each in dis.get_instructions(inner) if each.opname == "IMPORT_NAME")
    return list(dict.fromkeys(str(each.argval) for each in found))
