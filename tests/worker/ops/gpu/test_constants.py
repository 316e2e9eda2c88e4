"""Defaults of Triton's kernels that every version in pyproject.toml compiles."""

import ast

from tests.worker.ops.harness.triton_files import TRITON_FILES


def test_defaults_of_constants_are_numbers_or_constexpr() -> None:
    """Triton 3.6 compiles no kernel that calls another one whose default for a constant is text."""
    wrong = []
    for path in TRITON_FILES:
        for function in (one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.FunctionDef)):
            if any("triton.jit" in ast.unparse(one) for one in function.decorator_list):
                defaults = [*function.args.defaults, *filter(None, function.args.kw_defaults)]
                texts = [one for one in defaults if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                wrong += [f"{path.name}:{one.lineno}" for one in texts]
    assert not wrong
