r"""Cuts the text of a shell script into words and operators. Nothing is run or replaced here.

A word is a row of pieces, because quotes decide what becomes of each: ``a"$B"'$C'`` has the text
a, the variable B and the text $C. Comments, redirections' digits, line ends behind a backslash and
the texts of here-documents leave no word.
"""

import re
from dataclasses import dataclass, field
from typing import Final

from megatron.foreign.faults import ScriptError
from megatron.foreign.tokens import Kind, Operator, Piece, Token, Word

OPERATORS: Final = re.compile(r";;&|;;|;&|&&|\|\||&>>|&>|<<<|<<-|<<|<&|>&|>>|>\||<>|[;&|()<>]")
_BLANKS: Final = " \t\r\n"
_PLAIN: Final = re.compile(r"[^ \t\r\n\\'\"$`;&|()<>]+")
_IN_QUOTES: Final = re.compile(r"[^\\\"$`\n]+")
_NAME: Final = re.compile(r"[A-Za-z_]\w*|[0-9]|[#?$!@*-]", re.ASCII)
_ARRAY: Final = re.compile(r"[A-Za-z_]\w*\+?=", re.ASCII)
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r"}
_PAIRS: Final = {"(": ")", "{": "}", "[": "]"}
_KINDS: Final[dict[str, Kind]] = {"(": "command", "{": "variable", "[": "sum"}

LONGEST_SUM: Final = 200
"""Characters of the longest $((...)) that is computed; a longer one counts as a command."""


def tokens_of(text: str) -> list[Token]:
    """Return the words and operators of a script.

    Raises:
        ScriptError: a quote or a bracket is never closed.
    """
    return _Lexer(text).tokens()


def pieces_of(text: str, line: int) -> tuple[Piece, ...]:
    """Return the pieces of a text that is a word as a whole, such as the 8 of ${X:-8}.

    Raises:
        ScriptError: a quote or a bracket is never closed.
    """
    lexer, found = _Lexer(text, line=line), list[Piece]()
    while lexer.at < len(text):
        found += lexer.piece()
    return tuple(found)


@dataclass
class _Lexer:
    """Reads a text from its beginning to its end.

    Attributes:
        text: the text.
        at: place of the next character.
        line: number of its line.
        awaited: ends of the here-documents that begin behind the line, each with whether tabs may
            stand before it.
    """

    text: str
    at: int = 0
    line: int = 1
    awaited: list[tuple[str, bool]] = field(default_factory=list)
    no_sum_before: int = 0

    def tokens(self) -> list[Token]:
        """Return all tokens."""
        found: list[Token] = []
        while (token := self._next()) is not None:
            found.append(token)
            if isinstance(token, Operator) and token.text in ("<<", "<<-"):
                found.append(self._end_of_document(token))
        return found

    def _next(self) -> Token | None:
        """Return the next token; ``None`` at the end."""
        self._skip_blanks()
        if self.at == len(self.text):
            return None
        line = self.line
        if self.text[self.at] == "\n":
            self._step(1)
            self._skip_documents()
            return Operator(";", line)
        if self.text.startswith("((", self.at):
            inside = self._sum(2)
            if inside is not None:
                pieces = (Piece("text", "((", False, "(("), Piece("sum", inside, True, inside))
                return Word(pieces, line)
        if self.text.startswith(("<(", ">("), self.at):
            return self._word()
        if operator := OPERATORS.match(self.text, self.at):
            self._step(len(operator[0]))
            return Operator(operator[0], line)
        word = self._word()
        is_digit = (word.plain or "").isdigit()
        return self._next() if is_digit and self._peek() in ("<", ">") else word

    def _peek(self, ahead: int = 0) -> str:
        return self.text[self.at + ahead : self.at + ahead + 1]

    def _step(self, count: int) -> None:
        end = min(self.at + count, len(self.text))
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def _skip_blanks(self) -> None:
        """Go to the next character that is no blank, no comment and no continued line."""
        while self.at < len(self.text):
            if self._peek() in " \t\r":
                self._step(1)
            elif self.text.startswith("\\\n", self.at):
                self._step(2)
            elif self._peek() == "#":
                end = self.text.find("\n", self.at)
                self._step((len(self.text) if end < 0 else end) - self.at)
            else:
                return

    def _end_of_document(self, operator: Operator) -> Word:
        """Read the word that ends a here-document."""
        self._skip_blanks()
        word = self._word()
        self.awaited.append(("".join(p.text for p in word.pieces), operator.text == "<<-"))
        return word

    def _skip_documents(self) -> None:
        """Skip the here-documents that begin here."""
        for end, takes_tabs in self.awaited:
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                row = self.text[self.at : stop]
                self._step(min(stop + 1, len(self.text)) - self.at)
                if (row.lstrip("\t") if takes_tabs else row).rstrip("\r") == end:
                    break
        self.awaited.clear()

    def _word(self) -> Word:
        """Read a word; there is one."""
        pieces: list[Piece] = []
        line = self.line
        while self.at < len(self.text):
            here = self._peek()
            if here in _BLANKS or (OPERATORS.match(here) and not self._is_substitution(pieces)):
                break
            if self.text.startswith("\\\n", self.at):
                self._step(2)
            else:
                pieces += self.piece()
        if self._peek() == "(" and pieces and _ARRAY.fullmatch(self._written(pieces)):
            return Word(tuple(pieces), line, self._elements())
        return Word(tuple(pieces), line)

    def _is_substitution(self, pieces: list[Piece]) -> bool:
        return not pieces and self.text.startswith(("<(", ">("), self.at)

    @staticmethod
    def _written(pieces: list[Piece]) -> str:
        return "".join(piece.source for piece in pieces)

    def _elements(self) -> tuple[Word, ...]:
        """Read the words of ``(...)``."""
        line, found = self.line, list[Word]()
        self._step(1)
        while True:
            token = self._next()
            if token is None:
                raise ScriptError(line, "the bracket ( of this array is never closed: close it")
            if isinstance(token, Word):
                found.append(token)
            elif token.text == ")":
                return tuple(found)
            elif token.text != ";" or self.text[self.at - 1] != "\n":
                raise ScriptError(token.line, f"{token.text} in an array: quote it")

    def piece(self) -> list[Piece]:
        """Read the next piece; there is one."""
        here = self._peek()
        if here == "'":
            return [self._single_quoted(1)]
        if here == '"':
            return self._double_quoted()
        if here == "$" and self._peek(1) == "'":
            return [self._single_quoted(2)]
        if here in "$`" or (here in "<>" and self._peek(1) == "("):
            return [self._substitution(quoted=False)]
        if here == "\\":
            self._step(2)
            written = self.text[self.at - 2 : self.at]
            return [Piece("text", written[1:], True, written)]
        found = _PLAIN.match(self.text, self.at)
        text = found[0] if found else here
        self._step(len(text))
        return [Piece("text", text, False, text)]

    def _single_quoted(self, width: int) -> Piece:
        """Read '...', or $'...' with its escapes."""
        begin, line, at = self.at, self.line, self.at + width
        while (end := self.text.find("'", at)) > 0 and width == 2 and self._is_escaped(end):
            at = end + 1
        if end < 0:
            raise ScriptError(line, "this quote ' is never closed: close it")
        text = self.text[begin + width : end]
        if width == 2:
            text = re.sub(r"\\(.)", lambda one: _ESCAPES.get(one[1], one[1]), text)
        self._step(end + 1 - begin)
        return Piece("text", text, True, self.text[begin : end + 1])

    def _is_escaped(self, place: int) -> bool:
        count = 0
        while self.text[place - 1 - count] == "\\":
            count += 1
        return count % 2 == 1

    def _double_quoted(self) -> list[Piece]:
        """Read "..."; an empty piece stands for "" ."""
        line, found = self.line, [Piece("text", "", True, '"')]
        self._step(1)
        while (here := self._peek()) != '"':
            if not here:
                raise ScriptError(line, 'this quote " is never closed: close it')
            if here in "$`":
                found.append(self._substitution(quoted=True))
                continue
            if here == "\\":
                written = self.text[self.at : self.at + 2]
                text = written[1:] if written[1:] in ("$", "`", '"', "\\") else written
                text = "" if text == "\\\n" else text
            else:
                run = _IN_QUOTES.match(self.text, self.at)
                written = text = run[0] if run else here
            self._step(len(written))
            found.append(Piece("text", text, True, written))
        self._step(1)
        return [*found, Piece("text", "", True, '"')]

    def _substitution(self, *, quoted: bool) -> Piece:
        """Read $NAME, ${...}, $(...), $((...)), $[...], `...`, or a dollar alone."""
        begin, inside, kind = self.at, "", "command"
        if self._peek() == "`":
            inside = self._until_backtick()
        elif self.text.startswith("$((", self.at) and (found := self._sum(3)) is not None:
            inside, kind = found, "sum"
        elif self._peek(1) in _PAIRS:
            kind = _KINDS[self._peek(1)]
            inside = self._bracketed()
            kind = "command" if kind == "sum" and len(inside) > LONGEST_SUM else kind
        elif name := _NAME.match(self.text, self.at + 1):
            inside, kind = name[0], "variable"
            self._step(1 + len(inside))
        else:
            self._step(1)
            return Piece("text", "$", quoted, "$")
        own: Kind = "sum" if kind == "sum" else "variable" if kind == "variable" else "command"
        return Piece(own, inside, quoted, self.text[begin : self.at])

    def _until_backtick(self) -> str:
        line, end = self.line, self.at + 1
        while end < len(self.text) and (self.text[end] != "`" or self.text[end - 1] == "\\"):
            end += 1
        if end == len(self.text):
            raise ScriptError(line, "this quote ` is never closed: close it")
        inside = self.text[self.at + 1 : end]
        self._step(end + 1 - self.at)
        return inside

    def _sum(self, width: int) -> str | None:
        """Read ((...)) behind ``width`` characters; ``None``: it holds commands."""
        if self.at < self.no_sum_before:
            return None
        close = self._close_of(self.at + width - 2, LONGEST_SUM)
        if close is None:
            self.no_sum_before = self.at + LONGEST_SUM  # so that a row of brackets is read once
            return None
        if self.text[close - 1] != ")":
            return None
        inner = self._close_of(self.at + width - 1, LONGEST_SUM)
        if inner != close - 1:
            return None
        inside = self.text[self.at + width : inner]
        self._step(close + 1 - self.at)
        return inside

    def _bracketed(self) -> str:
        """Read ${...}, $(...), $[...] or <(...), and return the inside."""
        line, close = self.line, self._close_of(self.at + 1)
        if close is None:
            raise ScriptError(line, f"{self.text[self.at : self.at + 2]} is never closed: close it")
        inside = self.text[self.at + 2 : close]
        self._step(close + 1 - self.at)
        return inside

    def _close_of(self, opened: int, most: int | None = None) -> int | None:
        """Return the place of the bracket that closes the bracket at ``opened``.

        ``None``: there is none, or none within ``most`` characters.
        """
        own, depth, at, quote = self.text[opened], 0, opened, ""
        other, end = _PAIRS[own], len(self.text) if most is None else opened + most
        while at < min(end, len(self.text)):
            here = self.text[at]
            if here == "\\" and quote != "'":
                at += 1
            elif quote:
                quote = "" if here == quote else quote
            elif here in "'\"":
                quote = here
            elif here == own:
                depth += 1
            elif here == other:
                depth -= 1
                if depth == 0:
                    return at
            at += 1
        return None
