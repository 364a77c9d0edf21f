"""The template that writes every prompt of a run: jinja, in a sandbox, with the prompt's text and the row's columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from lmm_r1.errors import UserError

CONTENT = "content"
"""What a template calls the prompt's text, in which tags stand for images and videos."""
# What an expression of a template may end in.
_ERRORS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)


class PromptTemplate:
    """A jinja template; what it asks of a row that has no such column is an error."""

    def __init__(self, text: str, *, flag: str) -> None:
        """Compile it; raises UserError for a template that is broken or leaves the prompt out.

        Args:
            flag: the flag that gave it, for the messages.
        """
        self.text = text.strip()
        self.flag = flag
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            used = jinja2.meta.find_undeclared_variables(environment.parse(self.text))
            self._template = environment.from_string(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{flag} line {error.lineno}: {error.message}; correct the template") from error
        if CONTENT not in used:
            raise UserError(f"{flag} leaves the prompt out; write {{{{ {CONTENT} }}}} where it goes")

    def render(self, content: str, *, columns: Mapping[str, Any], location: str) -> str:
        """Return the prompt as the template writes it; raises UserError, with the location, where it cannot."""
        try:
            return self._template.render({**columns, CONTENT: content})
        except _ERRORS as error:
            raise UserError(f"{location}: {self.flag} cannot be filled in: {error}") from error
