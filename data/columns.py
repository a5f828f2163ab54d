"""Checks of the column of a table that holds the text."""

import pyarrow as pa

from data.storage import DataPath


def check_column(schema: pa.Schema, text_key: str, path: DataPath | str) -> None:
    """Raise ``ValueError`` if there is not one column ``text_key``, or it is not text."""
    if schema.names.count(text_key) != 1:
        problem = "several columns" if text_key in schema.names else "no column"
        text = f"{path} has {problem} {text_key!r}, only {', '.join(schema.names)}"
        raise ValueError(f"data.text_key: {text}")
    dtype = schema.field(text_key).type
    if not _is_text(dtype):
        raise ValueError(f"data.text_key: {text_key!r} of {path} is {dtype}, not text")


def _is_text(dtype: pa.DataType) -> bool:
    """True for strings of any of Arrow's layouts."""
    if pa.types.is_dictionary(dtype):
        return _is_text(dtype.value_type)
    types = pa.types
    return types.is_string(dtype) or types.is_large_string(dtype) or types.is_string_view(dtype)


def check_no_null(
    column: pa.ChunkedArray, text_key: str, path: DataPath | str, first_row: int = 0
) -> None:
    """Raise ``ValueError`` that names the first row that is null, if one is."""
    row = column.is_null().index(True).as_py()
    if row >= 0:
        text = f"{text_key!r} of {path}, row {first_row + row}, is null"
        raise ValueError(f"data.text_key: {text}")
