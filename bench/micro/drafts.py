"""Measures gain and cost of drafts: requests run with and without drafts in turns, in one process and thread.

python -m bench.micro.drafts [--model qwen3-0.6b | demo | PATH] [--sequences 1,8] [--new 64] [--rounds 3]
                             [--acceptance 0.8,0.65,0.5 [--head full | int4]] [--head own [--drafts 4]]
                             [--threads 1]

With --acceptance, the drafts are the tokens of the answer itself, recorded before. Some are made wrong at random: the
first draft of a step is right with the first probability, and so on. A step has at most as many drafts as there are
probabilities; the scheduler chooses the number from the accepted share, as with a draft model. This shows the gain of
a drafter that takes no time. With --head, an MTP head of the model's sizes also computes as many drafts, so that its
time counts. Its output projection is the model's own (full), or a copy in four bits (int4).

With --head own, the checkpoint's own MTP head proposes the drafts, as with --speculation auto. With --drafts, every
step has this number of drafts for each sequence, whatever they cost. This shows the accepted share at each position of
the drafts.

Without --acceptance and --head, there are three texts: greedy text; greedy text with drafts that are all wrong, which
shows the cost; and text at temperature 1, where a model with random weights never repeats itself. The demo model's
prompts begin stories, and its outputs end with the stories; other models ignore end tokens. With one thread, times are
CPU time, which other processes disturb little; with several threads, they are wall time. Outputs are compared.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.checkpoints import checkpoint
from deploy.launcher.child_command import DEMO_MODEL
from shared.config.flags import positive_int
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.gguf.translated import translated
from shared.messages import Sampling
from worker.engine.build import Engine, load_engine
from worker.models.decoder import Decoder, Weights
from worker.ops.linear.packed import pack_stacked
from worker.quantization.methods import AS_STORED
from worker.scheduler.drafts import MOST_DRAFTS, Drafter, Experience, WaitingDrafts
from worker.scheduler.ngrams import NgramDrafter
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Ids, Sequence
from worker.spec import ATTENTION
from worker.spec_decode import head_drafter
from worker.spec_decode.head_drafter import HeadDrafter
from worker.spec_decode.mtp import MtpHead, load_head

PROMPT = 64
HEROES = ("dog", "king", "cat", "teacher", "bird", "princess", "robot", "fisherman")


class RecordedDrafter(WaitingDrafts):
    """Proposes the tokens of a recorded answer. acceptance: the probability of a right draft at each position"""

    def __init__(self, recorded: list[int], acceptance: tuple[float, ...], experience: Experience) -> None:
        super().__init__(experience)
        self._recorded, self._right = recorded, acceptance
        self._draw = random.Random(recorded[0])

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0, ahead: Ids = ()) -> Ids:
        return self.recorded(len(tokens), self.wanted(tokens, min(limit, len(self._right)), cost, cost, repeats))

    def recorded(self, at: int, count: int) -> tuple[int, ...]:
        """Returns at most `count` drafts for the tokens from index `at` on."""
        drafts = self._recorded[at:][:count]
        right = [self._draw.random() < probability for probability in self._right]
        return tuple(id if good else id ^ 1 for id, good in zip(drafts, right, strict=False))


class RecordedProposer:
    """Runs a head only so that its time counts: discards the head's drafts, and proposes the drafts of a
    RecordedDrafter.

    drafters: one for each sequence, indexed by the id in the sequence's key.
    """

    def __init__(self, head: HeadDrafter, drafters: list[RecordedDrafter]) -> None:
        self._head, self._drafters = head, drafters
        self.forget, self.capture_graphs = head.forget, head.capture_graphs

    @property
    def seconds(self) -> float:
        return self._head.seconds

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        self._head.propose(wanted)
        return [self._drafters[sequence.key[1]].recorded(len(sequence.tokens), count) for sequence, count in wanted]


class AlwaysDrafting(WaitingDrafts):
    """Asks the model for the same number of drafts in every step."""

    def __init__(self, count: int) -> None:
        super().__init__(Experience())
        self._count = count

    def wanted(self, tokens: list[int], limit: int, text_cost: float, cost: float, repeats: int) -> int:
        return min(limit, self._count)


class WrongDrafter(NgramDrafter):
    """Proposes as many drafts as an n-gram drafter that finds a match in every step, but all drafts are wrong."""

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0, ahead: Ids = ()) -> Ids:
        self._indexes[0].find(tokens)
        return (0,) * self._last.draft_length(limit, cost)


@dataclass(frozen=True)
class Text:
    name: str
    temperature: float
    drafter: Callable[[list[int]], Drafter] = lambda recorded: NgramDrafter()  # recorded: the tokens of the sequence
    # makes an MTP head, which proposes the drafts; if the drafts are recorded, only the head's time counts
    head: Callable[[Engine], HeadDrafter] | None = None
    experience: Experience | None = None
    always: int = 0  # number of the head's drafts in every step; 0: the scheduler decides


TEMPERATURES = {"greedy": 0.0, "temperature 0.7": 0.7, "temperature 1": 1.0}
TEXTS = (
    Text("greedy", 0.0),
    Text("greedy, all drafts wrong", 0.0, lambda recorded: WrongDrafter()),
    Text("temperature 1", 1.0),
)


@dataclass
class Run:
    seconds: float
    tokens: list[list[int]]
    drafted: int
    accepted: int
    places: list[str]  # the accepted share of drafts, by position in a step


def prompts(folder: Path, vocab: int, count: int) -> list[list[int]]:
    if folder == DEMO_MODEL:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return [list(tokenizer.encode(f"Once upon a time there was a {hero} who").ids) for hero in HEROES[:count]]
    return [random.Random(id).choices(range(300, vocab), k=PROMPT) for id in range(count)]


def decode(
    engine: Engine, text: Text, prompt_tokens: list[list[int]], new: int, drafts: int, recorded: Run | None = None
) -> Run:
    """Measures decoding; prompts are computed before the time starts.

    recorded: an earlier run of the same requests.
    """
    config = SchedulerConfig(
        max_seq_len=2048, eos_token_ids=frozenset(engine.spec.eos_ids), max_draft_tokens=drafts, prefix_cache=False
    )
    scheduler = Scheduler(config, engine.pools)
    sequences, recorded_drafters = [], []
    for id, prompt in enumerate(prompt_tokens):
        sampling = Sampling(new + 1, temperature=text.temperature, ignore_eos=len(prompt) == PROMPT)
        sequences.append(Sequence((b"bench", id), list(prompt), len(prompt), sampling, id))
        if scheduler.speculation is not None:
            answer = [] if recorded is None else recorded.tokens[id]
            drafter = text.drafter([*prompt, *answer])
            if text.head is None:
                scheduler.speculation.drafters[sequences[-1]] = drafter
            elif isinstance(drafter, RecordedDrafter):
                recorded_drafters.append(drafter)
                own = WaitingDrafts(text.experience or Experience())  # proposes no drafts by itself
                scheduler.speculation.drafters[sequences[-1]] = own
            elif text.always:
                scheduler.speculation.drafters[sequences[-1]] = AlwaysDrafting(text.always)
        scheduler.submit(sequences[-1], 0.0)
    if scheduler.speculation is not None and text.head is not None:
        head = text.head(engine)
        engine.runner.hidden_reader = head
        scheduler.speculation.proposer = RecordedProposer(head, recorded_drafters) if recorded_drafters else head
    while not all(sequence.output_len for sequence in sequences):
        run_step(engine, scheduler)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begun = clock()
    while scheduler.has_work:
        run_step(engine, scheduler)
    seconds = clock() - begun
    engine.runner.hidden_reader = None
    outputs = [sequence.tokens[sequence.prompt_len :] for sequence in sequences]
    return Run(seconds, outputs, scheduler.status.draft_tokens, scheduler.status.accepted_tokens, _places(scheduler))


def _places(scheduler: Scheduler) -> list[str]:
    if scheduler.speculation is None:
        return []
    both = zip(scheduler.speculation.accepted_at, scheduler.speculation.drafted_at, strict=True)
    return [f"{accepted / drafted:.0%}" for accepted, drafted in both if drafted]


def run_step(engine: Engine, scheduler: Scheduler) -> None:
    plan = scheduler.plan(time.perf_counter())
    ids = engine.runner.step(plan).ids
    scheduler.launched(plan)
    scheduler.update(plan, ids, time.perf_counter())


def compare(engine: Engine, text: Text, prompt_tokens: list[list[int]], new: int, rounds: int) -> str:
    """Returns a line of the table. Raises AssertionError if drafts change an output."""
    plain, drafting = [], []
    for _ in range(rounds):
        plain.append(decode(engine, text, prompt_tokens, new, 0))
        drafting.append(decode(engine, text, prompt_tokens, new, MOST_DRAFTS, plain[0]))
    assert all(run.tokens == plain[0].tokens for run in (*plain, *drafting)), "drafts change an output"
    ratios = [one.seconds / other.seconds for one, other in zip(plain, drafting, strict=True)]
    tokens = sum(len(output) - 1 for output in plain[0].tokens)
    speed = tokens / statistics.median(run.seconds for run in plain)
    drafted, accepted = drafting[0].drafted, drafting[0].accepted
    return (
        f"| {text.name}, {len(prompt_tokens)} | {speed:.1f} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
        f"{max(ratios):.3f}) | {drafted / tokens:.2f} | {accepted / max(1, drafted):.0%}"
        f"{': ' + ', '.join(drafting[0].places) if text.always else ''} |"
    )


def _simulated(acceptance: tuple[float, ...], head: str) -> Text:
    made = None if not head else lambda engine: mtp_head(engine, in_few_bits=head == "int4")
    experience = Experience()  # shared by all runs, as a server's sequences share it
    return Text("greedy", 0.0, lambda recorded: RecordedDrafter(recorded, acceptance, experience), made, experience)


def mtp_head(engine: Engine, *, in_few_bits: bool) -> HeadDrafter:
    """Returns an MTP head of the model's sizes: its layer is the model's last one with attention."""
    weights, spec = engine.weights, engine.spec
    assert weights is not None
    at = max(index for index, layer in enumerate(spec.layers) if layer.mixer == ATTENTION)
    dtype, hidden = weights.embed.dtype, spec.hidden_size
    made = torch.randn(hidden, 2 * hidden).to(dtype)
    quantized = in_few_bits and spec.stored is not None  # a four-bit file has the head's own linears in four bits, too
    join = head_drafter.pack(made, dtype) if quantized else pack_stacked([made], dtype=dtype, invariant=True)
    vocabulary = head_drafter.pack(weights.embed.table(), dtype) if in_few_bits else weights.head
    own = Weights(weights.embed, [weights.layers[at]], weights.norm, vocabulary)
    decoder = Decoder(replace(spec, layers=(spec.layers[at],)), own, engine.limits.max_seq_len)
    return HeadDrafter(MtpHead(decoder, join, weights.norm, weights.norm), spec, 1 << 28)


def _own_texts(always: int) -> tuple[Text, ...]:
    """Returns the texts whose drafts the checkpoint's own head proposes."""
    return tuple(
        Text(f"{name}, own head", temperature, head=_own_head, always=always)
        for name, temperature in TEMPERATURES.items()
    )


def _own_head(engine: Engine) -> HeadDrafter:
    assert engine.weights is not None
    return HeadDrafter(
        load_head(engine.folder, engine.spec, engine.weights, AS_STORED, engine.limits.max_seq_len),
        engine.spec,
        1 << 28,
    )


def _folder(model: str) -> Path:
    return translated([Path(model)]) if model.endswith(".gguf") else checkpoint(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--sequences", default="1,8")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--acceptance", default="")
    parser.add_argument("--head", default="", choices=("", "full", "int4", "own"))
    parser.add_argument("--drafts", type=int, choices=range(1, 8), default=0)
    parser.add_argument("--threads", type=positive_int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = DEMO_MODEL if args.model == "demo" else _folder(args.model)
    texts = _own_texts(args.drafts) if args.head == "own" else TEXTS
    if args.acceptance:
        texts = (_simulated(tuple(map(float, args.acceptance.split(","))), args.head),)
    engine = load_engine(ModelConfig(model=str(folder)), WorkerConfig(device="cpu", kv_cache_gb=1.0, speculation="off"))
    print("| text, sequences | tokens/s without | speedup with drafts | drafts per token | accepted |")
    print("|---|--:|--:|--:|--:|")
    for sequences in map(int, args.sequences.split(",")):
        for text in texts:
            print(
                compare(engine, text, prompts(folder, engine.limits.vocab_size, sequences), args.new, args.rounds),
                flush=True,
            )


if __name__ == "__main__":
    main()
