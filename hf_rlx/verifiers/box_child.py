"""The program inside a box. It arrives as compiled code, imports the standard library only, and trusts its parent.

It says "ready", waits for one job and does it, under limits that it was started with:

    call      run the code as a module, then answer calls of its functions, one at a time
    program   run the code as `__main__` with a given standard input; the exit code tells how it ended
    tests     run test code in which the candidate's functions are stand-ins that ask the parent
    exec      write files, then become another program

Frames from the parent are 4 bytes of length and marshal. Lines to the parent are JSON: exact types only, a closed
vocabulary, and the random id that the parent sent last. Nothing secret is in this process: no expected value, no
environment, no file of the host.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import marshal
import posix
import sys

# Whatever is imported here costs every box, `os` more than a millisecond: hence `posix` itself, strings quoted without
# `json`, and types that are names only.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    def run(source: str, names: dict) -> None:
        """The boot code's: `exec` of text from a place without future imports. `compile` would set up all the types of
        syntax trees first, which takes a millisecond."""


_REPLY = 3
_DEPTH, _BITS, _SIZE = 40, 4000, 1 << 20
_exit, _write, _read, _loads = posix._exit, posix.write, posix.read, marshal.loads


class _Refused(Exception):  # noqa: N818 - its name is what the parent sees
    """A value outside of the vocabulary or its limits."""


_EXACT = (int, float, str, list, tuple, set, dict)
_CONVERT: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    list: lambda v: [*list.__iter__(v)],
    tuple: lambda v: (*tuple.__iter__(v),),
    set: lambda v: {*set.__iter__(v)},
    dict: lambda v: dict(dict.items(v)),
}


def _encoder() -> Callable[[Any], str]:
    """`encode(value) -> str`; every builtin that it needs is bound here, so candidates that patch some do no harm."""
    kind, text, number, yes, whole, real = type, str, float.__repr__, bool, int, float
    string, array, mapping, is_sub, refused = str, list, dict, issubclass, _Refused
    exact, convert, keys, deepest, bits, most = _EXACT, _CONVERT, ((tuple, "t"), (set, "s")), _DEPTH, _BITS, _SIZE
    is_ascii, is_printable, code_point = str.isascii, str.isprintable, ord

    def escaped(letter: str) -> str:
        code = code_point(letter)
        if code > 0xFFFF:  # JSON writes it as two surrogates
            code -= 0x10000
            return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
        return f"\\u{code:04x}"

    def quote(value: str) -> str:
        if is_ascii(value) and is_printable(value) and '"' not in value and "\\" not in value:
            return '"' + value + '"'
        return '"' + "".join([c if " " <= c <= "~" and c not in '"\\' else escaped(c) for c in value]) + '"'

    def plain(value: Any) -> Any:
        """NumPy's scalars and subclasses of builtins as what they hold; their own methods are not asked."""
        cls = kind(value)
        if cls.__module__ == "numpy" and "item" in dir(cls) and cls.__name__ != "ndarray":
            return cls.item(value)
        for base in exact:
            if is_sub(cls, base):
                return convert[base](value)
        raise refused(cls.__name__)

    def listed(values: Any, depth: int, left: list[int]) -> str:
        return ",".join([encode(value, depth, left) for value in values])

    def encode(value: Any, depth: int, left: list[int]) -> str:
        left[0] -= 8
        if depth > deepest or left[0] < 0:
            raise refused("too deep or too large")
        cls = kind(value)
        if value is None:
            return "null"
        if cls is yes:
            return "true" if value else "false"
        if cls is whole:
            if value.bit_length() > bits:
                raise refused("an integer of too many bits")
            return text(value)
        if cls is real:
            if value != value:
                raise refused("not a number")
            return number(value) if value - value == 0 else '{"f":"inf"}' if value > 0 else '{"f":"-inf"}'
        if cls is string:
            left[0] -= len(value)
            if left[0] < 0:
                raise refused("too large")
            return quote(value)
        if cls is array:
            return "[" + listed(value, depth + 1, left) + "]"
        for base, key in keys:
            if cls is base:
                return '{"' + key + '":[' + listed(value, depth + 1, left) + "]}"
        if cls is mapping:
            pairs = ["[" + listed(pair, depth + 1, left) + "]" for pair in mapping.items(value)]
            return '{"d":[' + ",".join(pairs) + "]}"
        return encode(plain(value), depth + 1, left)

    return lambda value: encode(value, 0, [most])


_encode = _encoder()


def _receive(control: int) -> Any:
    """The next frame, or the end of this process when the parent is gone."""
    data = b""
    while len(data) < 4:
        data += _some(control, 4 - len(data))
    wanted = int.from_bytes(data, "big")
    parts: list[bytes] = []
    got = 0
    while got < wanted:
        part = _some(control, min(1 << 20, wanted - got))
        parts.append(part)
        got += len(part)
    return _loads(b"".join(parts))


def _some(control: int, size: int) -> bytes:
    data = _read(control, size)
    if not data:
        _exit(121)
    return data


def _reply(text: str) -> None:
    data = text.encode() + b"\n"
    while data:
        data = data[_write(_REPLY, data) :]


def _message(ident: str, key: str, text: str) -> str:
    return f'{{"id":"{ident}","{key}":{text}}}'


def _fault(ident: str, error: BaseException) -> str:
    return _message(ident, "e", _encode(type(error).__name__[:80]))


def _files(stdin: bytes | None, quiet: bool) -> None:
    """Standard input from a file that has no name any more, or empty; output to nowhere when `quiet`."""
    if stdin:
        path = posix.environ.get(b"TMPDIR", b"/tmp") + b"/.input"
        descriptor = posix.open(path, posix.O_RDWR | posix.O_CREAT | posix.O_EXCL, 0o600)
        posix.unlink(path)
        data = memoryview(stdin)
        while data:
            data = data[posix.write(descriptor, data) :]
        posix.lseek(descriptor, 0, 0)
        posix.dup2(descriptor, 0)
        posix.close(descriptor)
    if quiet:
        nowhere = posix.open("/dev/null", posix.O_WRONLY)
        posix.dup2(nowhere, 1)
        posix.dup2(nowhere, 2)
        posix.close(nowhere)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _module(name: str) -> dict:
    """The names of a new module that is registered, as dataclasses and pickle need it to be."""
    module = type(sys)(name)
    sys.modules[name] = module
    module.__dict__["__builtins__"] = builtins
    return module.__dict__


def _interactive_names() -> None:
    """`exit` and `quit`, which an interpreter without `site` lacks."""
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D")


def _look_up(names: dict, name: str) -> Any:
    """A function, or a method of a new instance for `Class.method`."""
    first, _, method = name.partition(".")
    found = names[first]
    return getattr(found(), method) if method else found


def _serve(control: int, job: dict) -> None:
    """Load the code, then answer calls. An exception is an answer; what is meant to end a program ends this one."""
    names, ident, loaded = _module("solution"), job["id"], False
    try:
        run(job["code"], names)
        loaded = True
        _reply(_message(ident, "v", "null"))
        while True:
            ident, name, args, kwargs = _receive(control)
            try:
                text = _message(ident, "v", _encode(_look_up(names, name)(*args, **kwargs)))
            except Exception as error:
                text = _fault(ident, error)
            _reply(text)
            del text
    except BaseException as error:
        _reply(_fault(ident, error))
    _exit(0 if loaded else 1)


class _Raised(Exception):  # noqa: N818
    """The candidate raised something that tests cannot catch by name."""


def _stand_in(control: int, name: str, state: dict) -> Callable[..., Any]:
    """A function of the candidate: its calls go to the parent, and what it returns comes from there."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        given = f'{_encode(name)},"a":{_encode(list(args))},"k":{_encode(kwargs)}'
        _reply(_message(state["id"], "fn", given))
        state["id"], fine, value = _receive(control)
        if fine:
            return value
        kind = getattr(builtins, value, _Raised)
        if kind is StopIteration and not state["iterates"]:  # would end a `map` of the tests as if all were well
            kind = _Raised
        state["raised"] = kind(value) if isinstance(kind, type) and issubclass(kind, Exception) else _Raised(value)
        raise state["raised"]

    ask.__name__ = name
    return ask


def _test(control: int, job: dict) -> None:
    """Run setup, tests and, where there is an entry point, `check(candidate)`; answer with how it ended."""
    iterates = any("StopIteration" in source for source in job["tests"])
    names, state = _module("tests"), {"id": job["id"], "raised": None, "iterates": iterates}
    try:
        run(job["setup"], names)
        for name in job["stand_ins"]:
            names[name] = _stand_in(control, name, state)
        for source in job["tests"]:
            run(source, names)
        if job["entry_point"]:
            names["check"](names[job["entry_point"]])
    except AssertionError:
        answer = '"failed"'
    except BaseException as error:
        # A name that the tests themselves lack is the tests' fault; what a wrong value does to them is not.
        # A type that cannot be sent is the tests'; a size can be that of what the candidate returned before.
        missing = isinstance(error, (NameError, SyntaxError, ImportError)) or (
            isinstance(error, _Refused) and str(error).isidentifier()
        )
        broken = error is not state["raised"] and missing
        answer = _encode(("broken:" if broken else "raised:") + type(error).__name__ + ": " + str(error)[:200])
    else:
        answer = '"passed"'
    _reply(_message(state["id"], "v", answer))
    _exit(0)


def _become(job: dict) -> None:
    for name, content in job["files"].items():
        with open(name, "w", encoding="utf-8") as file:
            file.write(content)
    posix.execve(job["argv"][0], job["argv"], {**posix.environ, **job["env"]})


def main() -> None:
    """Be ready, take one job, do it."""
    control = posix.dup(0)
    posix.set_inheritable(_REPLY, False)
    nowhere = posix.open("/dev/null", posix.O_RDONLY)
    posix.dup2(nowhere, 0)
    posix.close(nowhere)
    _interactive_names()
    _write(_REPLY, b"ready\n")
    job = _receive(control)
    mode = job["mode"]
    if "cwd" in job:
        posix.chdir(job["cwd"])
    if mode == "exec":
        posix.close(control)
        _become(job)
    sys.path[:] = job["path"]
    _files(job.get("stdin"), quiet=mode != "program")
    if mode == "call":
        _serve(control, job)
    elif mode == "tests":
        _test(control, job)
    posix.close(control)
    posix.close(_REPLY)
    sys.argv = ["solution.py"]
    run(job["code"], _module("__main__"))


if __name__ == "__main__":
    main()
