"""From words to commands: the statements of a shell script as a tree. Nothing is run."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from megatron.foreign.faults import DEEPEST, ScriptError
from megatron.foreign.statements import (
    Block,
    Branches,
    Case,
    Chain,
    Function,
    Group,
    Loop,
    Simple,
    Statement,
)
from megatron.foreign.tokens import Operator, Piece, Token, Word
from megatron.foreign.words import tokens_of

_ENDS: Final = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
"""Reserved words that end a block."""


def statements_of(text: str) -> Block:
    """Return the statements of a script.

    Raises:
        ScriptError: quotes, brackets or reserved words do not match.
    """
    parser = _Parser(tokens_of(text))
    found = parser.block()
    if (left := parser.peek()) is not None:
        name = left.text if isinstance(left, Operator) else left.source
        raise ScriptError(left.line, f"{name} stands where no block is open: is a line missing?")
    return found


class _Parser:
    """Reads tokens from the first to the last."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._at = self._depth = 0

    def peek(self) -> Token | None:
        """Return the next token; ``None`` at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self) -> Token | None:
        token = self.peek()
        self._at += 1
        return token

    def _is_operator(self, *texts: str) -> bool:
        token = self.peek()
        return isinstance(token, Operator) and token.text in texts

    def _reserved(self) -> str:
        """Return the next token if it may be a reserved word; else nothing."""
        token = self.peek()
        return (token.plain or "") if isinstance(token, Word) else ""

    def _line(self) -> int:
        token = self.peek() or (self._tokens[-1] if self._tokens else None)
        return token.line if token else 1

    def _skip_ends(self) -> None:
        while self._is_operator(";", "&"):
            self._at += 1

    def block(self) -> Block:
        """Read statements up to the end, or to a closing word or bracket, which is not taken."""
        found = list[Statement]()
        self._skip_ends()
        while self.peek() is not None and not self._is_operator(")", ";;", ";&", ";;&"):
            if self._reserved() in _ENDS:
                break
            line, own = self._line(), self._chain()
            found.append(Group((own,), line, is_apart=True) if self._is_operator("&") else own)
            self._skip_ends()
        return tuple(found)

    def _expect(self, word: str, opened: str, line: int) -> None:
        """Take a reserved word or an operator that closes a block."""
        is_there = self._is_operator(word) if word == ")" else self._reserved() == word
        if not is_there:
            raise ScriptError(line, f"{opened} has no {word}: add it, or give the whole script")
        self._at += 1

    def _chain(self) -> Statement:
        """Read statements joined by && || and |."""
        line, links = self._line(), list[tuple[str, Statement]]()
        joint = ""
        while True:
            links.append((joint, self._statement()))
            if not self._is_operator("&&", "||", "|"):
                break
            operator = self._next()
            assert isinstance(operator, Operator)
            joint = operator.text
            while self._is_operator(";"):  # the line goes on
                self._at += 1
        return links[0][1] if len(links) == 1 else Chain(tuple(links), line)

    def _statement(self) -> Statement:
        readers: dict[str, Callable[[], Statement]] = {
            "if": self._if,
            "case": self._case,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "{": self._braces,
            "function": self._function,
        }
        if self._depth > DEEPEST:
            raise ScriptError(self._line(), f"more than {DEEPEST} levels of blocks: flatten them")
        self._depth += 1
        word, mark = self._reserved(), self.peek()
        if word == "!":
            self._at += 1
            statement = self._statement()
            if isinstance(statement, Simple) and isinstance(mark, Word):
                statement = Simple((mark, *statement.words), statement.line)
        elif word in readers or self._is_operator("("):
            statement = readers[word]() if word in readers else self._brackets()
            self._skip_redirections()
        else:
            statement = self._simple()
        self._depth -= 1
        return statement

    def _if(self) -> Statement:
        line, branches, otherwise = self._line(), list[tuple[Block, Block]](), Block()
        self._at += 1
        while True:
            condition = self.block()
            self._expect("then", "if", line)
            branches.append((condition, self.block()))
            if self._reserved() != "elif":
                break
            self._at += 1
        if self._reserved() == "else":
            self._at += 1
            otherwise = self.block()
        self._expect("fi", "if", line)
        return Branches(tuple(branches), otherwise, line)

    def _case(self) -> Statement:
        line, choices = self._line(), list[tuple[tuple[Word, ...], Block]]()
        falls = False
        self._at += 1
        word = self._word_of("case")
        self._skip_ends()
        self._expect("in", "case", line)
        self._skip_ends()
        while self.peek() is not None and self._reserved() != "esac":
            if self._is_operator("("):
                self._at += 1
            patterns = [self._word_of("case")]
            while self._is_operator("|"):
                self._at += 1
                patterns.append(self._word_of("case"))
            self._expect(")", "a pattern of case", self._line())
            choices.append((tuple(patterns), self.block()))
            if self._is_operator(";;", ";&", ";;&"):
                falls = falls or not self._is_operator(";;")
                self._at += 1
            self._skip_ends()
        self._expect("esac", "case", line)
        return Case(word, tuple(choices), line, falls)

    def _word_of(self, owner: str) -> Word:
        line, token = self._line(), self._next()
        if not isinstance(token, Word):
            raise ScriptError(line, f"a word is missing behind {owner}: give the whole script")
        return token

    def _for(self) -> Statement:
        line, is_asked = self._line(), self._reserved() == "select"
        self._at += 1
        head, words = self._word_of("for"), None
        name = head.plain or ""
        self._skip_ends()
        if self._reserved() == "in":
            self._at += 1
            words = tuple(self._words_until_end())
        self._skip_ends()
        begin = () if head.plain is not None else (Simple((head,), line),)
        body = (*begin, *self._do(line, "for"))
        return Loop(name, None if is_asked else words, body, line)

    def _words_until_end(self) -> Iterator[Word]:
        while isinstance(token := self.peek(), Word):
            self._at += 1
            yield token

    def _while(self) -> Statement:
        line = self._line()
        self._at += 1
        condition = self.block()
        return Loop("", None, (*condition, *self._do(line, "while")), line)

    def _do(self, line: int, opened: str) -> Block:
        if self._reserved() == "{":
            group = self._braces()
            return group.body
        self._expect("do", opened, line)
        body = self.block()
        self._expect("done", opened, line)
        return body

    def _braces(self) -> Group:
        line = self._line()
        self._at += 1
        body = self.block()
        self._expect("}", "{", line)
        return Group(body, line)

    def _brackets(self) -> Group:
        line = self._line()
        self._at += 1
        body = self.block()
        self._expect(")", "(", line)
        return Group(body, line, is_apart=True)

    def _function(self) -> Statement:
        line = self._line()
        self._at += 1
        name = self._word_of("function").plain or ""
        if self._is_operator("("):
            self._at += 1
            self._expect(")", "(", line)
        return self._body_of(name, line)

    def _body_of(self, name: str, line: int) -> Function:
        self._skip_ends()
        return Function(name, (self._statement(),), line)

    def _skip_redirections(self) -> None:
        """Skip the words behind a block on its line."""
        while (token := self.peek()) is not None:
            if isinstance(token, Operator) and token.redirects:
                self._at += 2
            else:
                return

    def _simple(self) -> Statement:
        """Read a command: words up to an operator, without redirections."""
        line, words = self._line(), list[Word]()
        while (token := self.peek()) is not None:
            if isinstance(token, Word):
                self._at += 1
                words.append(token)
                if token.plain == "[[" and len(words) == 1:
                    words += self._double_brackets(line)
            elif token.redirects:
                self._at += 2
            elif token.text == "(" and len(words) == 1 and words[0].plain is not None:
                self._at += 1
                self._expect(")", words[0].source, line)
                return self._body_of(words[0].plain, line)
            elif not words:
                raise ScriptError(token.line, f"{token.text} begins a command: is a word missing?")
            else:
                break
        return Simple(tuple(words), line)

    def _double_brackets(self, line: int) -> Iterator[Word]:
        """Yield the words of [[ ... ]], in which operators are words."""
        while (token := self._next()) is not None:
            own = token if isinstance(token, Word) else _as_word(token)
            yield own
            if own.plain == "]]":
                return
        raise ScriptError(line, "[[ has no ]]: add it")


def _as_word(operator: Operator) -> Word:
    return Word((Piece("text", operator.text, False, operator.text),), operator.line)
