"""Which other programs a script starts, read from its source: calls by what they resolve to, commands by their text.

Nothing is run. A name stands for what is assigned to it in its function or module, or handed to that parameter in the
modules read; what cannot be told is … in the text.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from mismatch_plugin.launch.commands import UNKNOWN, starts_trainer

# Full name → the positional arguments that are the command, and the keywords that may be it.
_SHELL_LINE = re.compile(
    r"os\.(system|popen)|asyncio\.(subprocess\.)?create_subprocess_shell|(slime|miles)\.(\w+\.)*exec_command\w*"
    r"|subprocess\.(run|call|check_call|check_output|Popen|getoutput|getstatusoutput)"
)
_PROGRAM_AND_ARGUMENTS = re.compile(r"os\.(exec[lv]\w*|posix_spawnp?)|asyncio\.(subprocess\.)?create_subprocess_exec")
_MODE_FIRST = re.compile(r"os\.spawn\w+")
_HELPER = re.compile(r"(slime|miles)\.(\w+\.)*execute_train\w*")
_RAY_CLIENT = re.compile(r"ray\.(\w+\.)*JobSubmissionClient")
_KEYWORDS = ("args", "cmd", "command", "entrypoint", "program")
_STARRED = {
    "os": ("system", "popen", "execv", "execve", "execvp", "execvpe", "execl", "execlp", "spawnv", "spawnvp"),
    "subprocess": ("run", "call", "check_call", "check_output", "Popen", "getoutput", "getstatusoutput"),
}
# Calls whose text is that of their first argument.
_SAME_TEXT = ("shlex.split", "shlex.join", "textwrap.dedent", "shutil.which", "pathlib.Path", "os.path.abspath")
_SAME_TEXT_BUILTINS = ("str", "list", "tuple", "print")
_SAME_TEXT_METHODS = ("split", "strip", "format", "replace", "lstrip", "rstrip", "copy", "as_posix")
_GROWS = ("append", "extend", "insert")
_DEEPEST = 12
_LONGEST = 20_000

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = ast.Module | _Function
_Value = tuple["Source", ast.expr, "_Scope"]


class Source:
    """One module: what its names come from, and every call with the function that it is in."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name, self.tree = name, tree
        self.origins = _origins(tree)
        self.calls: list[tuple[ast.Call, _Scope]] = []
        self.values: dict[tuple[int, str], list[tuple[ast.expr, _Scope]]] = {}
        self.functions: dict[str, _Function] = {}
        self.parents: dict[int, _Scope] = {}
        self._read()

    def resolve(self, node: ast.expr) -> str | None:
        """Full dotted name of an expression that begins with something imported."""
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        if not isinstance(node, ast.Name):
            return None
        if node.id in self.origins:
            return self.origins[node.id]
        given = self.values.get((id(self.tree), node.id), [])  # run = subprocess.run
        plain = [value for value, _ in given if isinstance(value, ast.Attribute | ast.Name) and value is not node]
        return self.resolve(plain[0]) if len(plain) == len(given) == 1 and isinstance(plain[0], ast.Attribute) else None

    def uses_ray_client(self) -> bool:
        """Whether the module names the class that submits Ray jobs."""
        names = (self.resolve(node) for node in ast.walk(self.tree) if isinstance(node, ast.Attribute | ast.Name))
        return any(name is not None and _RAY_CLIENT.fullmatch(name) for name in names)

    def _read(self) -> None:
        """Without recursion: generated scripts nest deeper than Python's stack."""
        waiting: list[tuple[ast.AST, _Scope]] = [(self.tree, self.tree)]
        while waiting:
            node, scope = waiting.pop()
            self._note_values(node, scope)
            if isinstance(node, ast.Call):
                self.calls.append((node, scope))
            elif isinstance(node, _Function):
                self.functions.setdefault(node.name, node)
                self.parents[id(node)] = scope
                scope = node
            waiting += [(child, scope) for child in reversed(list(ast.iter_child_nodes(node)))]

    def _note_values(self, node: ast.AST, scope: _Scope) -> None:
        targets: list[ast.expr] = []
        values: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets, values = node.targets, [node.value]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            targets, values = [node.target], [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GROWS:
            targets, values = [node.func.value], node.args[-1:]
        for target in targets:
            if isinstance(target, ast.Name):
                self.values.setdefault((id(scope), target.id), []).extend((value, scope) for value in values)


def trainer_starts(sources: list[Source]) -> Iterator[tuple[Source, str, int]]:
    """(module, call as written, line) of every call that starts what looks like a trainer."""
    for source in sources:
        submits = source.uses_ray_client()
        for call, scope in source.calls:
            name = source.resolve(call.func) or ""
            job = submits and isinstance(call.func, ast.Attribute) and call.func.attr == "submit_job"
            try:
                command = _Text(sources).of_call(source, call, scope, name, job)
            except RecursionError:
                command = UNKNOWN
            if _HELPER.fullmatch(name) or starts_trainer(command):
                yield source, ast.unparse(call.func), call.lineno


class _Text:
    """Reads the text of expressions, each name once on the way."""

    def __init__(self, sources: list[Source]) -> None:
        self.sources = sources
        self.open: set[tuple[int, str]] = set()

    def of_call(self, source: Source, call: ast.Call, scope: _Scope, name: str, job: bool) -> str:
        """The command that a call runs; empty where it runs none."""
        if job or _SHELL_LINE.fullmatch(name):
            keywords = [keyword.value for keyword in call.keywords if keyword.arg in _KEYWORDS]
            return "\n".join(self.of((source, node, scope)) for node in [*call.args[:1], *keywords])
        if _PROGRAM_AND_ARGUMENTS.fullmatch(name):
            return self._words((source, node, scope) for node in call.args)
        if _MODE_FIRST.fullmatch(name):
            return self._words((source, node, scope) for node in call.args[1:])
        return ""

    def of(self, value: _Value) -> str:
        """The text of an expression, a list as the line of shell that it is."""
        source, node, scope = value
        if len(self.open) > _DEEPEST:
            return UNKNOWN
        match node:
            case ast.Constant(value=str() as text):
                return text[:_LONGEST]
            case ast.JoinedStr(values=parts):
                return "".join(self.of((source, part, scope)) for part in parts)
            case ast.FormattedValue(value=inner) | ast.Starred(value=inner) | ast.Await(value=inner):
                return self.of((source, inner, scope))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return self._words((source, item, scope) for item in items)
            case ast.BinOp(left=left, op=op, right=right):
                first, second = self.of((source, left, scope)), self.of((source, right, scope))
                if isinstance(op, ast.Mod):
                    return re.sub(r"%[sdrif]", second, first, count=1) if "\\" not in second else first
                lists = isinstance(op, ast.Add) and (self._is_list(source, left) or self._is_list(source, right))
                return f"{first}{' ' if lists else '/' if isinstance(op, ast.Div) else ''}{second}"
            case ast.IfExp(body=body, orelse=other):
                return self._any((source, body, scope), (source, other, scope))
            case ast.BoolOp(values=values):
                return self._any(*((source, item, scope) for item in values))
            case ast.Name(id=name):
                return self._of_name(source, name, scope)
            case ast.Attribute():
                return "python" if source.resolve(node) == "sys.executable" else UNKNOWN
            case ast.Call():
                return self._of_result(source, node, scope)
        return UNKNOWN

    def _words(self, values: Iterable[_Value]) -> str:
        words = []
        for source, node, scope in values:
            text = self.of((source, node, scope))
            whole = isinstance(node, ast.Starred) or self._is_list(source, node)
            words.append(text if whole else shlex.quote(text))
        return " ".join(words)

    def _any(self, *values: _Value) -> str:
        return "\n".join(dict.fromkeys(self.of(value) for value in values))[:_LONGEST]

    def _of_name(self, source: Source, name: str, scope: _Scope) -> str:
        if source.resolve(ast.Name(name)) == "sys.executable":
            return "python"
        at: _Scope | None = scope
        while at is not None:
            values: list[_Value] = [(source, *value) for value in source.values.get((id(at), name), [])]
            if isinstance(at, _Function):
                values += self._handed_to(source, at, name)
            key = (id(at), name)
            if values and key not in self.open:
                self.open.add(key)
                text = self._any(*values)
                self.open.discard(key)
                return text
            at = source.parents.get(id(at))
        return UNKNOWN

    def _handed_to(self, source: Source, function: _Function, name: str) -> list[_Value]:
        """What the modules read hand to a parameter, and its default."""
        arguments = function.args
        positional = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
        found: list[_Value] = []
        index = positional.index(name) if name in positional else None
        if index is not None and len(positional) - index <= len(arguments.defaults):
            default = arguments.defaults[index - len(positional)]
            found.append((source, default, source.tree))
        for other in self.sources:
            for call, scope in other.calls:
                if _callee(source, other, call) != function.name:
                    continue
                given = [keyword.value for keyword in call.keywords if keyword.arg == name]
                if index is not None:
                    given += call.args[index : index + 1]
                elif arguments.vararg is not None and arguments.vararg.arg == name:
                    given.append(ast.List(call.args[len(positional) :], ast.Load()))
                found += [(other, value, scope) for value in given]
        return found

    def _of_result(self, source: Source, call: ast.Call, scope: _Scope) -> str:
        name = source.resolve(call.func)
        first: list[_Value] = [(source, node, scope) for node in call.args[:1]]
        if isinstance(call.func, ast.Name) and call.func.id in source.functions:
            function = source.functions[call.func.id]
            key = (id(function), "return")
            if key in self.open:
                return UNKNOWN
            self.open.add(key)
            returned = (node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value)
            text = self._any(*((source, value, function) for value in returned))
            self.open.discard(key)
            return text
        if name == "os.path.join":
            return "/".join(self.of((source, node, scope)) for node in call.args)
        builtin = isinstance(call.func, ast.Name) and call.func.id in _SAME_TEXT_BUILTINS
        if first and (name in _SAME_TEXT or builtin):
            return self.of(first[0])
        if name is None and isinstance(call.func, ast.Attribute):
            if call.func.attr == "join" and first:
                return self.of(first[0])
            if call.func.attr in _SAME_TEXT_METHODS:
                return self.of((source, call.func.value, scope))
        return UNKNOWN

    def _is_list(self, source: Source, node: Any) -> bool:
        """Whether it holds several words: a list, or a name that is given one."""
        if isinstance(node, ast.BinOp):
            return self._is_list(source, node.left) or self._is_list(source, node.right)
        if isinstance(node, ast.Name):
            given = (value for (_, name), values in source.values.items() if name == node.id for value, _ in values)
            return any(isinstance(value, ast.List | ast.Tuple) for value in given)
        if isinstance(node, ast.Call):
            return ast.unparse(node.func) in ("shlex.split", "list") or ast.unparse(node.func).endswith(".split")
        return isinstance(node, ast.List | ast.Tuple)


def _callee(source: Source, other: Source, call: ast.Call) -> str | None:
    """Name of the function of `source` that a call in `other` calls."""
    if other is source and isinstance(call.func, ast.Name):
        return call.func.id
    module, _, name = (other.resolve(call.func) or "").rpartition(".")
    return name if module == source.name else None


def _origins(tree: ast.Module) -> dict[str, str]:
    """Name → what it was imported as, in full."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                found[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names = _STARRED.get(node.module, ()) if alias.name == "*" else (alias.name,)
                for name in names:
                    found[alias.asname or name] = f"{node.module}.{name}"
    return found
