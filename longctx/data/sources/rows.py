"""Rows of tables, or lines of JSON, as documents: texts, conversations, or compared answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.config.data_config import DataConfig
from longctx.config.fields import refuse
from longctx.data.documents import Document, NamedRows
from longctx.data.messages import Row, format_of

if TYPE_CHECKING:
    from longctx.data.chat import Template


def chat_template(config: DataConfig) -> Template | None:
    """Return the template of data.chat=true, in the folder of the tokenizer; None for text."""
    if not config.chat:
        return None
    from longctx.data.chat import Template  # jinja2

    problem = "needs a tokenizer with a chat template; give data.tokenizer= or init="
    refuse((config.tokenizer is None, f"data.chat=true: {problem}"))
    path = Path(config.tokenizer or "").expanduser()
    return Template(path if path.is_dir() else path.parent, config.turns)


def documents_in(
    rows: NamedRows, config: DataConfig, template: Template | None
) -> Iterator[Document]:
    """Read the document of each row: its text, its conversation, or its answers."""
    if config.preferences:
        from longctx.data import preferences

        documents = preferences.documents(rows, config, template)
    elif template is not None:
        documents = template.conversations(rows)
    else:
        documents = (Document(name, text_in(row, location, config)) for name, location, row in rows)
    replaces = config.errors == "replace"
    yield from (document.replaced() for document in documents) if replaces else documents


def of_table(row: Row) -> dict[str, Any]:
    """Return a row of a table without nulls in its structs, which have the fields of all rows: a
    call of one tool would be learned with the arguments of every other one.
    """
    return {name: _without_nulls(cell) for name, cell in row.items()}


def _without_nulls(cell: Any) -> Any:
    if isinstance(cell, dict):
        return {name: _without_nulls(inner) for name, inner in cell.items() if inner is not None}
    return [*map(_without_nulls, cell)] if isinstance(cell, list) else cell


def is_read(row: Row, config: DataConfig) -> bool:
    """Return True if a row has the fields of the documents that `config` reads."""
    if config.preferences:
        return ("chosen" if config.preferences == "pairs" else "completion") in row
    return format_of(row) is not None if config.chat else config.text_column in row


def text_in(row: Row, location: str, config: DataConfig) -> str:
    """Return the text of a row, "" for null: such a document is left out and counted."""
    column = config.text_column
    found = f"found {', '.join(f'{name:.40}' for name in list(row)[:8])}"
    advice = "set data.text_column; data.chat=true reads conversations, `train objective=dpo` pairs"
    refuse((column not in row, f"{location}: no field '{column}' ({found}); {advice}"))
    text = row[column]
    problem = f"{location}: '{column}' is {type(text).__name__}, expected a string"
    refuse((not isinstance(text, str | None), f"{problem}; set data.text_column"))
    return text or ""
