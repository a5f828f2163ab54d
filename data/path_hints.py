"""Advice for a ``data.path`` that matches nothing, from its text alone."""

import re

SOURCES = "give each path its own [[data.sources]]"
SEPARATORS = {",": "a comma", ";": "a semicolon", ":": "a colon", " ": "a space"}


def unmatched_hint(pattern: str) -> str:
    """Say what in ``pattern`` means nothing here, and what to write instead; "" if nothing does.

    Only for a pattern that matches no file: the name of a file may have any character.
    """
    if pattern != pattern.strip():
        return "it begins or ends with white space"
    if url := re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+)://", pattern):
        return f"only local files are read: a path has no {url[0]}"
    if len(pattern) > 1 and pattern[0] == pattern[-1] and pattern[0] in "'\"":
        return "the quotation marks are part of it: remove them"
    if re.search(r"\{[^{}]*(,|\.\.)[^{}]*\}", pattern):
        return f"braces are not expanded: {SOURCES}, or use * and [ab], which match characters"
    for separator, name in SEPARATORS.items():
        parts = pattern.split(separator)
        # A separator inside of one path is not the reason: each part must look like a path.
        if len(parts) > 1 and all(re.search(r"[./*]", part) for part in parts if part.strip()):
            return f"{name} separates nothing: {SOURCES}"
    if "\\" in pattern:
        return "folders are separated by /, not by a backslash"
    if pattern.endswith("/"):
        return "it ends with /, which matches only folders"
    return ""
