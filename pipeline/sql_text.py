"""SQL as people type it: several statements in one text. Owns where one ends and the next begins."""

from __future__ import annotations

import re

# What may hold a semicolon that ends nothing: text in quotes (with its escapes), quoted names, comments.
_TOKEN = re.compile(
    r"""(?P<quoted>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`)"""
    r"""|(?P<comment>--[^\n]*|/\*.*?\*/)"""
    r"""|(?P<open>'|"|`|/\*)"""
    r"""|(?P<end>;)""",
    re.DOTALL,
)


def split_statements(text: str) -> tuple[list[str], str]:
    """Give the finished statements and what is begun after them."""
    statements, begin = [], 0
    for match in _TOKEN.finditer(text):
        if match["open"]:
            break  # a quote or comment that is not closed yet: nothing after it is known to end
        if match["end"]:
            statements.append(text[begin : match.start()].strip())
            begin = match.end()
    rest = text[begin:].strip()
    return [statement for statement in statements if _says_something(statement)], rest if _says_something(rest) else ""


def _says_something(statement: str) -> bool:
    without_comments = _TOKEN.sub(lambda match: "" if match["comment"] else match[0], statement)
    return bool(without_comments.strip())
