"""Says before a download whether a model fits this machine: bytes to fetch, memory, context, tokens per second.

The sizes come from the headers of the model's files, of which the hub sends the beginning, and from the loader's own
arithmetic (worker/engine/forecast.py, in a process of its own, because it imports torch). The speed comes from a trial
of a few layers in that process. For models with experts it comes from the measured speed of memory: a decoded token
reads the chosen weights once.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from deploy.cli.doctor import free_disk, hub_cache
from deploy.cli.machine_speed import Speed
from deploy.cli.stored_models import size_text
from deploy.launcher.child_command import CliError, child_environment
from shared.gguf.naming import HUB_NAME, GgufError, Model, chosen, listed, models_among, quantization_of
from shared.gguf.translated import fetch_headers, tower_among, translated
from shared.hf_hub import CHECKPOINT_FILES, IGNORED_FILES, HubError, fetch, fetch_beginning, fetched_bytes, file_sizes
from shared.machine import CPU_SHARE

# Formats of GGUF files in the order of preference where all are fast enough: more bits first, but not more than eight,
# which no reader of answers can tell from the original. The others follow only if there is none of these.
PREFERRED = (
    "Q8_0", "UD-Q8_K_XL", "Q6_K", "UD-Q6_K_XL", "Q5_K_M", "UD-Q5_K_XL", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M",
    "UD-Q4_K_XL", "Q4_K_S", "MXFP4", "MXFP4_MOE", "NVFP4", "Q4_1", "IQ4_NL", "Q4_0", "IQ4_XS", "Q3_K_L", "Q3_K_M",
    "Q3_K_S", "Q2_K",
)  # fmt: skip
# IQ1, IQ2, IQ3 and ternary formats come last: they take at least 4.25 bits in memory, so they only save fetching.
OTHERS = (
    "BF16", "F16", "F32", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "UD-IQ3_XXS", "Q2_K_S", "UD-IQ2_M", "IQ2_M", "IQ2_S",
    "IQ2_XS", "UD-IQ2_XXS", "IQ2_XXS", "TQ2_0", "TQ1_0", "UD-IQ1_M", "IQ1_M", "UD-IQ1_S", "IQ1_S",
)  # fmt: skip
MIDDLE, FOUR_BITS = PREFERRED.index("Q4_K_M"), PREFERRED.index("IQ4_XS")
FAST_ENOUGH = 10.0  # tokens/s: faster than most people read
CONTEXT_WANTED = 8192  # tokens: a format that leaves room for less is not chosen while a smaller one is offered
HEADER_BYTES = 4 << 20  # of a safetensors file
TYPICAL_TOKENS = 1000  # the length of a conversation for which the speed is stated
# Which part of the measured speed of memory decoding reaches, without and with experts, and a step's time beside it: a
# layer's calls and barriers; sampling and messages. From the runs on CPUs in bench/RESULTS.md, not from this machine.
READING, READING_EXPERTS, LAYER_S, STEP_S = 0.92, 0.66, 8e-6, 4e-4
SPARE_DISK = 256 << 20  # bytes that a download leaves on the disk
FORECAST_S = 300.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """How much memory a model will take, and what a decoded token reads, as worker/engine/forecast.py finds out.

    weights, read, kv, pool: bytes. weights: of all in memory. read: of the weights that one decoded token reads.
    kv: of the K/V that one more token of a sequence takes, in the layers that keep all positions.
    pool: of the K/V pool. context: the longest sequence that the pool holds, in tokens; 0: the model does not fit.
    trained: the longest sequence that the model was trained for. layers: how many layers it has.
    sparse: whether it has experts, of which a token reads a part here and a part there.
    processes: bytes of all processes of the server besides weights and K/V.
    windows: for each group of layers that keep a window of positions, the window and the K/V's bytes of a position.
    step_s: seconds of a decoded token at the beginning of a sequence, as tried here; 0: not tried. kv_byte_s: seconds
    that each byte of the sequence's K/V adds.
    """

    weights: int
    read: int
    kv: int
    pool: int
    context: int
    trained: int
    layers: int
    sparse: bool = False
    processes: int = 0
    windows: Sequence[Sequence[int]] = ()
    step_s: float = 0.0
    kv_byte_s: float = 0.0

    def tokens_per_s(self, speed: Speed | None, tokens: int = TYPICAL_TOKENS) -> float | None:
        """Returns how many tokens a second one sequence of so many tokens is expected to get; None if neither the model
        was tried nor the speed of this machine is known.
        """
        if self.step_s:
            return 1 / (self.step_s + self._kv_read(tokens) * self.kv_byte_s + STEP_S)
        if speed is None:
            return None
        reached = READING_EXPERTS if self.sparse else READING
        reading = (self.read + self._kv_read(tokens)) / (reached * speed.read_gb_s * 1e9)
        return 1 / (reading + self.layers * LAYER_S + STEP_S)

    def _kv_read(self, tokens: int) -> int:
        """Returns how many bytes of K/V a token reads behind so many others."""
        return self.kv * tokens + sum(min(tokens, window) * nbytes for window, nbytes in self.windows)

    def scaled(self, factor: float, memory: int) -> "Forecast":
        """Returns about the forecast for the same model in a format with `factor` times the bytes.

        memory: bytes that are available for everything
        """
        weights = int(self.weights * factor)
        pool = max(0, int(CPU_SHARE * (memory - weights - self.processes)))
        context = min(self.trained, pool // max(self.kv, 1))
        read, step_s = int(self.read * factor), self.step_s * factor
        return replace(self, weights=weights, read=read, pool=pool, context=context, step_s=step_s)


@dataclass(frozen=True, slots=True)
class Offer:
    """A model as it can be had. model: what `sluice serve` takes. nbytes: of its files. fetch: bytes to download."""

    model: str
    nbytes: int
    fetch: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known about an offer before it is fetched.

    forecast: None if only the size of its files is known. speed: of this machine; None if it is not known.
    memory: bytes that are available here. disk: free bytes where it would be kept.
    others: the other formats that the repository has. timed: whether the speed was to be found out.
    """

    offer: Offer
    forecast: Forecast | None
    speed: Speed | None
    memory: int
    disk: int
    others: str = ""
    timed: bool = True

    @property
    def tokens_per_s(self) -> float | None:
        return self.forecast.tokens_per_s(self.speed) if self.forecast else None

    @property
    def problem(self) -> str:
        """A sentence that says why the model should not be fetched; empty if it should."""
        if self.offer.fetch and self.offer.fetch + SPARE_DISK > self.disk:
            return (
                f"the download of {size_text(self.offer.fetch)} does not fit on the disk, which has "
                f"{size_text(self.disk)} free; `sluice models` lists what can go, and HF_HOME names another disk"
            )
        if self.forecast and not self.forecast.context:
            return (
                f"{self.offer.model} does not fit: its weights take {size_text(self.forecast.weights)}, and "
                f"{size_text(self.memory)} of memory are available; end other processes, or run a smaller model"
            )
        return ""

    def lines(self) -> list[str]:
        """Returns the verdict for a terminal."""
        found = self.forecast
        fetch = self.offer.fetch
        here = f"{size_text(self.offer.nbytes)}, all of it is here" if not fetch else f"{size_text(fetch)} to fetch"
        if fetch and fetch < self.offer.nbytes:
            here += f" of {size_text(self.offer.nbytes)}"
        rows = [("files", f"{here}; {size_text(self.disk)} are free on the disk")]
        if found is None:
            rows.append(("memory", "unknown until the files are here"))
        else:
            fits = "fits" if found.context else "does not fit"
            whole = found.weights + found.processes
            rows.append((
                "memory",
                f"{size_text(found.weights)} for the weights, {size_text(whole)} with the processes, and K/V, of "
                f"{size_text(self.memory)}: {fits}",
            ))  # fmt: skip
        if found is not None and found.context:
            rows.append(("context", f"{found.context:,} tokens of the model's {found.trained:,}"))
            if self.timed:
                rows.append(("speed", self._speed(found)))
        if self.others:
            rows.append(("formats", f"also {self.others}: name one as {self.offer.model.rpartition(':')[0]}:FORMAT"))
        return [f"  {name:<8} {text}" for name, text in rows]

    def _speed(self, found: Forecast) -> str:
        typical, last = found.tokens_per_s(self.speed), found.tokens_per_s(self.speed, found.context)
        if typical is None or last is None:
            return "unknown: `sluice doctor` says why"
        source = "as tried with some of its layers"
        if self.speed and not found.step_s:
            source = f"memory at {self.speed.read_gb_s:.0f} GB/s"
        source += ", measured while other processes ran" if self.speed and self.speed.busy else ""
        return f"about {typical:.0f} tokens/s, {last:.0f} at the end of the context ({source})"


@dataclass(slots=True)
class Judge:
    """Judges the models of one hub repository, or one model on this machine.

    measure: returns the speed of this machine; called once it is known that there is a model to judge, since it may
    have to measure. memory: bytes that are available. tries: whether the speed of a model is found out by a trial
    of some of its layers, which takes all cores for some seconds, and says nothing about a GPU.
    """

    measure: Callable[[], Speed | None]
    memory: int
    revision: str = ""
    mmproj: str = ""
    tries: bool = True
    _sizes: dict[str, int] = field(default_factory=dict)

    def local(self, model: str, folder: Path, nbytes: int, *, timed: bool = True) -> Verdict:
        """Judges a checkpoint or translated GGUF model that is on this machine. Raises CliError if it is not served.

        timed: find out the speed, too, which takes some seconds
        """
        found = run_forecast(folder, self.memory, tried=timed and self.tries)
        speed = self.measure() if timed else None
        return Verdict(Offer(model, nbytes), found, speed, self.memory, free_disk(folder), timed=timed)

    def hub(self, model: str) -> Verdict:
        """Judges a hub id or org/repository:NAME; chooses the best format where it names none.

        Raises CliError if there is no such model, the hub cannot be asked, or the model is not served.
        """
        named = HUB_NAME.fullmatch(model)
        repository = named["repository"] if named else model
        try:
            self._sizes = file_sizes(repository, revision=self.revision)
            if named:
                return self._gguf(repository, chosen(repository, self._sizes, named["wanted"]), "")
            if any(name.endswith(".safetensors") for name in self._sizes):
                return self._safetensors(repository)
            if models := models_among(self._sizes):
                return self._best(repository, models)
        except (HubError, GgufError) as error:
            raise CliError(error, 3) from error
        raise CliError(f"{repository!r} has neither safetensors nor GGUF files", 3)

    def _best(self, repository: str, models: Sequence[Model]) -> Verdict:
        """Judges the format with the most bits that fits and is fast enough, else the fastest of those that fit."""
        ranked = ranked_formats(models)
        if not ranked:
            raise CliError(f"{repository!r} has no format that is chosen by itself; name one of {listed(models)}", 3)
        middle = min(ranked, key=lambda model: abs(_rank(model) - MIDDLE))
        verdict = self._gguf(repository, middle, _others(models, middle))
        if verdict.forecast is None:
            return verdict
        sizes = {model[0]: sum(self._sizes[name] for name in model) for model in ranked}
        best = best_format(ranked, middle, verdict.forecast, verdict.speed, sizes, self.memory)
        return verdict if best == middle else self._gguf(repository, best, _others(models, best))

    def _gguf(self, repository: str, model: Model, others: str) -> Verdict:
        tower = None if self.mmproj else tower_among(self._sizes, model)
        files = [*model, *([tower] if tower else [])]
        wanted = quantization_of(model)
        name = wanted if sum(quantization_of(one) == wanted for one in models_among(self._sizes)) == 1 else model[0]
        headers = fetch_headers(repository, model, self.revision)
        return self._verdict(f"{repository}:{name}", repository, files, translated(headers), others)

    def _safetensors(self, repository: str) -> Verdict:
        weights = [name for name in self._sizes if fnmatch(name, "model*.safetensors")]
        ignored = [name for name in self._sizes if any(fnmatch(name, pattern) for pattern in IGNORED_FILES)]
        files = [
            name for name in self._sizes
            if name not in ignored and any(fnmatch(name, pattern) for pattern in CHECKPOINT_FILES)
        ]  # fmt: skip
        small = ["config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors.index.json"]
        texts = fetch(repository, small, revision=self.revision)
        with tempfile.TemporaryDirectory() as temporary:
            folder, beginnings = Path(temporary), Path(temporary) / "beginnings"
            beginnings.mkdir()
            for text in texts.glob("*.json"):
                (folder / text.name).symlink_to(text.resolve())
            for name in weights:
                (folder / name).symlink_to(
                    fetch_beginning(repository, name, HEADER_BYTES, beginnings, revision=self.revision)
                )
            return self._verdict(repository, repository, files, folder, "")

    def _verdict(self, model: str, repository: str, files: Sequence[str], folder: Path, others: str) -> Verdict:
        sizes = {name: self._sizes[name] for name in files}
        nbytes = sum(sizes.values())
        fetch = nbytes - fetched_bytes(repository, sizes, revision=self.revision)
        offer, found = Offer(model, nbytes, fetch), run_forecast(folder, self.memory, tried=self.tries)
        return Verdict(offer, found, self.measure(), self.memory, free_disk(hub_cache()), others)


def _rank(model: Model) -> int:
    order = (*PREFERRED, *OTHERS)
    wanted = quantization_of(model)
    return order.index(wanted) if wanted in order else len(order)


def ranked_formats(models: Sequence[Model]) -> list[Model]:
    """Returns the models whose formats may be chosen, the preferred first; those in OTHERS only if alone."""
    known = sorted((model for model in models if _rank(model) < len(PREFERRED)), key=_rank)
    return known or sorted((model for model in models if _rank(model) < len(PREFERRED) + len(OTHERS)), key=_rank)


def best_format(
    ranked: Sequence[Model],
    middle: Model,
    forecast: Forecast,
    speed: Speed | None,
    sizes: Mapping[str, int],
    memory: int,
) -> Model:
    """Returns the first format that fits with CONTEXT_WANTED and is FAST_ENOUGH; without one, the smallest that fits.

    ranked: the preferred first. forecast: that of `middle`, from which those of the others follow by their sizes
    (bytes, by the name of the first file). speed: None: all are fast enough. memory: bytes that are available.
    """
    expected = {model[0]: forecast.scaled(sizes[model[0]] / sizes[middle[0]], memory) for model in ranked}
    wanted = min(CONTEXT_WANTED, forecast.trained)
    fitting = [model for model in ranked if expected[model[0]].context >= wanted]
    for model in fitting:
        rate = expected[model[0]].tokens_per_s(speed)
        if rate is None or rate >= FAST_ENOUGH:
            return model
    four_bits = [model for model in fitting if _rank(model) <= FOUR_BITS]
    return (four_bits or fitting or [min(ranked, key=lambda model: sizes[model[0]])])[-1]


def _others(models: Sequence[Model], model: Model) -> str:
    return listed([other for other in models if other != model])


def run_forecast(folder: Path, memory: int, *, tried: bool) -> Forecast:
    """Returns the forecast for a checkpoint. tried: with a trial of some layers

    Raises CliError, with the worker's sentence, if it is not served.
    """
    command = [sys.executable, "-P", "-m", "worker.engine.forecast", str(folder), str(memory), *["tried"] * tried]
    environment = child_environment() | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=FORECAST_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CliError(f"the forecast of memory did not end: {error}", 1) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["the forecast of memory ended without a word"]
        raise CliError(lines[-1], 3 if done.returncode == 3 else 1)
    fields: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return Forecast(**fields)
