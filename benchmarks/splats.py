"""Finds calls f(**x) and f(*x) of a local x that the same function writes out."""

import ast
import pathlib
from collections.abc import Iterator

_OTHERS = (ast.DictComp, ast.List, ast.ListComp, ast.Tuple)


def splats(path: pathlib.Path) -> Iterator[bool]:
    """Yields for each such call in a file whether `x` is a dictionary, not a comprehension."""
    found = {}  # By position: nodes of nested functions occur in several.
    functions = [x for x in ast.walk(ast.parse(path.read_text())) if hasattr(x, "returns")]
    for nodes in ([*ast.walk(function)] for function in functions):
        built = {}
        for x in nodes:
            if isinstance(x, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                sides = [getattr(x.value, "left", x.value), getattr(x.value, "right", None)]
                is_dict = isinstance(sides[0], ast.Dict) or isinstance(sides[1], ast.Dict)
                if is_dict or any(isinstance(side, _OTHERS) for side in sides):
                    target = x.targets[0] if isinstance(x, ast.Assign) else x.target
                    built[ast.unparse(target)] = is_dict
        for call in (x for x in nodes if isinstance(x, ast.Call)):
            for x in (*call.args, *call.keywords):
                is_splat = isinstance(x, ast.Starred) or getattr(x, "arg", "") is None
                if is_splat and (name := ast.unparse(x.value)) in built:
                    found[x.lineno, x.col_offset] = built[name]
    yield from found.values()
