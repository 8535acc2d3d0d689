"""Render formulas as MathML, which browsers display without scripts or fonts from elsewhere."""

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx


def to_mathml(tex: str, block: bool) -> str:
    """Return ``tex`` as a MathML element.

    Raises:
        ValueError: The converter does not support a part of the formula.
    """
    try:
        code = rf"\begin{{aligned}}{tex}\end{{aligned}}" if "&" in tex else tex
        return latex2mathml.tex2mathml(code, as_block=block)
    except MathError as error:
        raise ValueError(f"the formula cannot be converted to MathML: {error}: {tex}") from error


def visit_inline(translator, node: nodes.math) -> None:
    translator.body.append(f'<span class="math">{to_mathml(node.astext(), False)}</span>')
    raise nodes.SkipNode


def visit_block(translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{to_mathml(node.astext(), True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", inline_renderers=(visit_inline, None), block_renderers=(visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
