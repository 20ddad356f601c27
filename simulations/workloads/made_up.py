"""Made-up workloads: open arrivals, users who wait for their answers, and conversations. All from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from ksana.errors import ConfigError
from simulations.requests import Ending, ListedText, NamedText, PromptSource, SimRequest, Workload
from simulations.workloads.lengths import Lengths, parse_lengths


class Texts(msgspec.Struct, frozen=True, kw_only=True):
    """What made-up requests say: lengths as in `simulations.workloads.lengths.FORMS`."""

    input_tokens: str = "512"
    """Of the request's own text, after a shared prefix."""
    output_tokens: str = "128"
    num_prefixes: int = 0
    """So many system prompts are shared; the k-th is k times as rare as the first. 0: nothing is shared."""
    prefix_tokens: str = "256"
    timeout_s: float = 1e6

    def __post_init__(self) -> None:
        if not 0 <= self.num_prefixes <= 100_000:
            raise ConfigError(f"num_prefixes goes from 0 to 100,000, not {self.num_prefixes}")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive, not {self.timeout_s:g}")
        for text in (self.input_tokens, self.output_tokens, self.prefix_tokens):
            parse_lengths(text)


class Writer:
    """Makes requests of fresh texts. What is drawn comes from the generator that is passed in."""

    def __init__(self, seed: int, texts: Texts) -> None:
        self._texts = texts
        self._inputs: Lengths = parse_lengths(texts.input_tokens)
        self._outputs: Lengths = parse_lengths(texts.output_tokens)
        lengths = parse_lengths(texts.prefix_tokens)
        rng = random.Random(seed)
        self._prefixes = [NamedText(k, lengths.draw(rng)) for k in range(texts.num_prefixes)]
        self._weights = [1 / (k + 1) for k in range(texts.num_prefixes)]
        self._next_id = texts.num_prefixes

    def text(self, rng: random.Random) -> NamedText:
        """A text that nobody wrote before."""
        self._next_id += 1
        return NamedText(self._next_id - 1, self._inputs.draw(rng))

    def prompt(self, rng: random.Random) -> PromptSource:
        prefix = rng.choices(self._prefixes, self._weights) if self._prefixes else []
        return PromptSource((*prefix, self.text(rng)))

    def request(
        self, rng: random.Random, arrival_s: float, prompt: PromptSource, session: int | None = None
    ) -> SimRequest:
        return SimRequest(
            arrival_s=arrival_s,
            prompt=prompt,
            max_tokens=self._outputs.draw(rng),
            seed=rng.randrange(1 << 32),
            timeout_s=self._texts.timeout_s,
            session=session,
        )


def arrival_gaps(rng: random.Random, rate_per_s: float, cv: float) -> Iterator[float]:
    """Seconds between arrivals: a gamma distribution whose coefficient of variation is `cv`.

    1 is a Poisson process, above 1 comes in bursts, 0 is a metronome.
    """
    while True:
        if cv == 0:
            yield 1 / rate_per_s
        elif cv == 1:
            yield rng.expovariate(rate_per_s)
        else:
            yield rng.gammavariate(1 / cv**2, cv**2 / rate_per_s)


def open_requests(
    seed: int, texts: Texts, num_requests: int, rate_per_s: float, cv: float
) -> Iterator[SimRequest]:
    """Requests that come however slow the answers are. Another rate changes the times and nothing else."""
    writer, rng = Writer(seed, texts), random.Random(f"texts {seed}")
    gaps = arrival_gaps(random.Random(f"arrivals {seed}"), rate_per_s, cv)
    at_s = 0.0
    for _ in range(num_requests):
        at_s += next(gaps)
        yield writer.request(rng, at_s, writer.prompt(rng))


class ClosedLoop(Workload):
    """`num_users` users: each asks, waits for the answer, thinks, and asks something else.

    They begin spread evenly over the first `think_s` seconds; thinking takes that long on average. What
    a user asks does not depend on when others are answered.
    """

    def __init__(
        self, seed: int, texts: Texts, *, num_users: int, num_requests: int, think_s: float = 0.0
    ) -> None:
        self._writer = Writer(seed, texts)
        self._num_users = min(num_users, num_requests)
        self._users = [random.Random(f"user {seed} {user}") for user in range(self._num_users)]
        self._num_left = num_requests - self._num_users
        self._think_s = think_s

    def first(self) -> Iterator[SimRequest]:
        for user in range(self._num_users):
            yield self._ask(user, self._think_s * user / self._num_users)

    def after(self, ending: Ending) -> SimRequest | None:
        user = ending.request.session
        assert user is not None
        if not self._num_left:
            return None
        self._num_left -= 1
        return self._ask(user, ending.at_s + _thinking(self._users[user], self._think_s))

    def _ask(self, user: int, at_s: float) -> SimRequest:
        rng = self._users[user]
        return self._writer.request(rng, at_s, self._writer.prompt(rng), user)


class Sessions(Workload):
    """Conversations that begin at random; each turn's prompt is all that was said before, and a new text.

    A conversation ends after its turns, when its next prompt would be longer than `max_prompt_tokens`, or
    when a turn was not answered. What is said in one does not depend on when others are answered.
    """

    def __init__(
        self,
        seed: int,
        texts: Texts,
        *,
        num_sessions: int,
        rate_per_s: float,
        turns: Lengths,
        think_s: float,
        max_prompt_tokens: int,
    ) -> None:
        self._seed = seed
        self._writer = Writer(seed, texts)
        self._gaps = arrival_gaps(random.Random(f"arrivals {seed}"), rate_per_s, 1.0)
        self._num_sessions = num_sessions
        self._turns = turns
        self._think_s = think_s
        self._max_prompt_tokens = max_prompt_tokens
        self._open: dict[int, tuple[random.Random, int]] = {}
        """By session: its generator and its turns to come."""

    def first(self) -> Iterator[SimRequest]:
        at_s = 0.0
        for session in range(self._num_sessions):
            at_s += next(self._gaps)
            rng = random.Random(f"session {self._seed} {session}")
            self._open[session] = rng, self._turns.draw(rng) - 1
            yield self._writer.request(rng, at_s, self._writer.prompt(rng), session)

    def after(self, ending: Ending) -> SimRequest | None:
        session = ending.request.session
        assert session is not None
        rng, num_left = self._open.pop(session)
        if not num_left or not ending.finished:
            return None
        prompt = ending.request.prompt.then(ListedText(ending.output_ids), self._writer.text(rng))
        if prompt.num_tokens > self._max_prompt_tokens:
            return None
        self._open[session] = rng, num_left - 1
        return self._writer.request(rng, ending.at_s + _thinking(rng, self._think_s), prompt, session)


def _thinking(rng: random.Random, mean_s: float) -> float:
    return rng.expovariate(1 / mean_s) if mean_s > 0 else 0.0
