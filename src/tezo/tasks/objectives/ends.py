"""What ends an answer, and where one begins in text: for what is learnt, what is written and what is shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_QUESTION, _ANSWER = "mark-of-a-question", "mark-of-an-answer"


@dataclass(frozen=True)
class Ends:
    """The ends of answers that a model knows.

    Attributes:
        text: id of the token that ends a text; None if neither the tokenizer nor the model's configuration names one.
        turn: what the chat template writes after the assistant's message, up to its token; "" if it writes no token.
        turn_token: id of that token; None if there is none.
        marks: all ids that end an answer -> the token.
    """

    text: int | None
    turn: str
    turn_token: int | None
    marks: dict[int, str]

    def within(self, answer: str, before: str, *, chat: bool) -> tuple[str, int | None]:
        """(an answer with what the template writes after it, once; the token that must then end it, or None).

        Args:
            answer: the text, which may have its end already.
            before: the text in front of it.
            chat: whether a chat template wrote that; it also counts as such if it has the token that ends turns.
        """
        rendered = self.turn_token is not None and (chat or self.marks[self.turn_token] in before)
        bare = answer.rstrip()
        if bare.endswith(tuple(self.marks.values())):  # what follows the token in a template is not learnt
            return bare, self.turn_token if rendered else self.text
        return (answer + self.turn, self.turn_token) if rendered else (answer, self.text)


def ends_of(tokenizer: Any, model: Any) -> Ends:
    """The ends by a tokenizer with its chat template, and by a model's generation_config, which may have several."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    configured = [int(token) for token in (named if isinstance(named, list | tuple) else [named]) if token is not None]
    known = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}  # a default of an architecture may be a word
    own = [int(tokenizer.eos_token_id)] if tokenizer.eos_token_id is not None else []
    text = next((token for token in (*own, *configured) if token in known), None)
    turn, turn_token = _turn(tokenizer)
    ids = [*own, *configured, *([turn_token] if turn_token is not None else [])]
    tokens = {token: tokenizer.convert_ids_to_tokens(token) for token in ids}
    return Ends(text, turn, turn_token, {token: name for token, name in tokens.items() if name})


def _turn(tokenizer: Any) -> tuple[str, int | None]:
    """(what the chat template writes after the assistant's message, up to its first token; that token)."""
    if tokenizer.chat_template is None:
        return "", None
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        whole = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template that needs more than these messages
        return "", None
    _, found, after = whole.rpartition(_ANSWER)
    places = [
        (after.index(token.content), -len(token.content), token.content, number)
        for number, token in tokenizer.added_tokens_decoder.items()
        if found and token.content.strip() and token.content in after
    ]
    if not places:
        return "", None
    place, _, token, number = min(places)
    return after[: place + len(token)], int(number)


def text_after(tokenizer: Any, before: Sequence[int], ids: Sequence[int], *, special: bool) -> str:
    """The text of tokens behind others, with the space that some tokenizers take from a first word.

    `special`: with the special tokens.
    """

    def text(tokens: Sequence[int]) -> str:
        # spaces before punctuation, which some tokenizers clean up, are part of an answer
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(tokens), **options))

    start, whole = text(before), text([*before, *ids])
    return whole[len(start) :] if whole.startswith(start) else text(ids)
