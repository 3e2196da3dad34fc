"""The command line: generate, chat, explain, serve, batch, inspect, bench, verify, tune, train. Flags come from the
option dataclasses.

It does not know how anything is done. The one trick: every error a user can mend leaves through one door, as one
line that names the value and the way out, with exit status 2. What a command does is imported when it runs.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import click

from . import flags
from .bench.options import BenchOptions, TuneOptions
from .decoding.grammar import StructuredOutputsParams
from .decoding.sampling import SamplingParams
from .drafters import registry
from .engine.options import EngineOptions
from .errors import OptionError, PilotfishError, UserError
from .models.options import LoadOptions
from .proof.options import VerifyOptions
from .scale.environment import prepare
from .scale.options import NOT_OF_A_BATCH, ScaleOptions
from .server.options import BatchOptions, ServeOptions
from .train.options import Eagle3Options, MedusaOptions, TrainOptions

_EXTRAS = {"serve": ("prometheus_client", "pydantic", "starlette", "uvicorn"), "ray": ("ray", "pandas", "pyarrow")}
_SAMPLING_DEFAULTS = {"temperature": 0.0}  # at the prompt people expect the same answer twice
_EXPLAIN_DEFAULTS = {"temperature": 0.8, "max_tokens": 32}  # so that there are coins to see, on one page


class _Commands(click.Group):
    """Turns our errors into one line and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            click.echo(f"pilotfish: {error}", err=True)
            ctx.exit(2)
        except PilotfishError as error:
            click.echo(f"pilotfish: {error}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:  # while modules or weights are loaded: there is nothing to show yet
            ctx.exit(130)
        except BrokenPipeError:  # the reader of our output left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(141)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="pilotfish")
def main() -> None:
    """Lossless speculative decoding: the target model's own text, several tokens per pass."""


_name_flag = click.option("-m", "--model", default="demo", show_default=True, help="folder, hub id, GGUF file, or demo")


def _model_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    return _name_flag(flags.from_fields(LoadOptions, EngineOptions)(command))


def _drafting_flags(
    several: bool = False, without: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--method, --draft-model, and every option of every method."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        kinds: list[type] = [
            registry.CommonOptions,
            *(registry.drafter_class(name).Options for name in registry.methods()),
        ]
        command = flags.from_fields(*kinds, without=without)(command)
        again = "; may be given several times" if several else ""
        command = click.option(
            "--method", multiple=several, help=f"how to draft: {', '.join(registry.methods())}{again}"
        )(command)
        return click.option(
            "--speculative-config", metavar="JSON", help="vLLM's JSON, or @FILE; the flags below are short forms"
        )(command)

    return decorate


def _sampling_flags(
    default: Mapping[str, float] = _SAMPLING_DEFAULTS,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = flags.from_fields(SamplingParams, StructuredOutputsParams, default=default)(command)
        command = click.option(
            "--stop", multiple=True, help="end the text before this string; may be given several times"
        )(command)
        return click.option("--stop-token-ids", multiple=True, type=int, help="end the text after this token id")(
            command
        )

    return decorate


_trace_flag = click.option("--trace", metavar="FILE", help="write a record of each pass into this JSONL file")


@main.command()
@click.argument("prompt", required=False)
@click.option("-f", "--file", type=click.File("r", encoding="utf-8"), help="read the prompt from a file (- is stdin)")
@click.option("--raw", is_flag=True, help="do not put the prompt into the model's chat format")
@click.option("--reference", type=click.File("r", encoding="utf-8"), help="a text the answer will resemble")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead of the text")
@_trace_flag
@_model_flags
@_drafting_flags()
@_sampling_flags()
def generate(
    prompt: str | None,
    file: Any,
    raw: bool,
    reference: Any,
    as_json: bool,
    trace: str | None,
    model: str,
    **values: Any,
) -> None:
    """Complete PROMPT, streaming.

    On a terminal, tokens that were drafted and accepted are coloured.
    """
    if (prompt is None) == (file is None):
        raise OptionError("give either PROMPT or --file")
    text = prompt if file is None else _read_text(file)
    params = _params(values)
    with _traced(trace) as listen:
        llm = _llm(model, values)
        listen(llm)
        ids = _asked(llm, str(text), raw)
        hint = _read_text(reference) if reference else None
        if as_json or params.n > 1:
            _print_json(llm, ids, params, hint)
            return
        from .terminal import show

        interrupted = show(llm.stream(ids, params, reference=hint), llm=llm)
    if interrupted:
        raise SystemExit(130)


@main.command()
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="do not put the prompt into the model's chat format")
@click.option("--html", metavar="FILE", help="also write the story as one page that needs nothing else")
@_trace_flag
@_model_flags
@_drafting_flags()
@_sampling_flags(_EXPLAIN_DEFAULTS)
def explain(prompt: str, raw: bool, html: str | None, trace: str | None, model: str, **values: Any) -> None:
    """Show how speculative decoding works, on PROMPT.

    Each pass of a real run: what was guessed, p and q, the coin, what was kept, and where the other token came from.
    Drafts with layers of the model itself unless told otherwise; the same command tells the same story again.
    """
    from .explain.run import DEFAULTS, run_explain

    params = _params(values, _EXPLAIN_DEFAULTS)
    config = registry.resolve_aliases(_drafting(values))
    if "method" not in config and "model" not in config:
        config = DEFAULTS | config
    llm = _llm(model, values, {"num_speculative_tokens": DEFAULTS["num_speculative_tokens"]} | config)
    about = {"prompt": prompt, "model": llm.describe()}
    run_explain(llm, _asked(llm, prompt, raw), params, about, html=html, trace=trace)


def _asked(llm: Any, text: str, raw: bool) -> Any:
    """A prompt as the model's chat format has it, if there is one."""
    if raw or llm.tokenizer is None or not llm.tokenizer.hf.chat_template:
        return text
    return llm.chat_prompt([{"role": "user", "content": text}])


@contextlib.contextmanager
def _traced(path: str | None) -> Iterator[Callable[[Any], None]]:
    """What has an LLM's passes written into this file, which is opened now, before a model is loaded."""
    if path is None:
        yield lambda _llm: None
        return
    from .trace import TraceFile, listen

    with TraceFile(path) as file:
        yield lambda llm: listen(llm.engine, llm.tokenizer, file.write)


@main.command()
@click.option("--system", help="a system message")
@_model_flags
@_drafting_flags()
@_sampling_flags()
def chat(system: str | None, model: str, **values: Any) -> None:
    """Talk to the model.

    An empty line or Ctrl-D ends the talk, Ctrl-C cuts an answer short.
    """
    from .terminal import show

    params = _params(values)
    llm = _llm(model, values)
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    for line in _lines():
        messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        show(llm.stream(llm.chat_prompt(messages), params), pieces, llm)
        messages.append({"role": "assistant", "content": "".join(pieces)})


_adapters_flag = click.option(
    "--adapters",
    multiple=True,
    metavar="NAME=FOLDER",
    help="a LoRA adapter kept beside the weights: a request whose model is NAME is written by it; may be given several "
    "times",
)


@main.command()
@_model_flags
@_adapters_flag
@_drafting_flags()
@flags.from_fields(ServeOptions, ScaleOptions)
def serve(model: str, **values: Any) -> None:
    """Serve the OpenAI API.

    Chats, completions, streams, metrics. Ctrl-C or SIGTERM lets running requests end, a second one does not.
    """
    key = os.environ.get("PILOTFISH_API_KEY")
    options = flags.pick(ServeOptions, values, **({} if key is None else {"api_key": key}))
    scale = flags.pick(ScaleOptions, values)
    if scale.ray:
        prepare(scale)
        with _extra("serve --ray"):
            from .scale.deploy import serve_on_ray
        serve_on_ray(_recipe(model, values), options, scale)
        return
    with _extra("serve"):
        from .server.run import serve as run
    run(options, lambda: _llm(model, values))


@main.command()
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@_model_flags
@_adapters_flag
@_drafting_flags()
@flags.from_fields(BatchOptions)
@flags.from_fields(ScaleOptions, without=NOT_OF_A_BATCH)
def batch(source: str, target: str, model: str, **values: Any) -> None:
    """Answer the requests in SOURCE, a line each in OpenAI's batch format, into TARGET.

    Many at once, in the order they get ready. However it was ended, the same command goes on where it stopped.
    """
    options, scale = flags.pick(BatchOptions, values), flags.pick(ScaleOptions, values)
    if scale.ray:
        prepare(scale)
        with _extra("batch --ray"):
            from .scale.data import run_batch_on_ray
        run_batch_on_ray(options, source, target, _recipe(model, values), scale)
        return
    with _extra("batch"):
        from .server.batch import run_batch
    run_batch(options, source, target, lambda: _llm(model, values))


def _recipe(model: str, values: Mapping[str, Any]) -> Any:
    """What each engine loads for itself, elsewhere."""
    from .scale.recipe import Recipe

    load, engine = flags.pick(LoadOptions, values), flags.pick(EngineOptions, values)
    return Recipe(model=model, speculative_config=_drafting(values), load=load, engine=engine)


@contextlib.contextmanager
def _extra(command: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        for extra, packages in _EXTRAS.items():
            if missing in packages:
                told = f"{command} needs {missing}, which is not installed: pip install 'pilotfish[{extra}]'"
                raise OptionError(told) from None
        raise


@main.command()
@click.argument("model", default="demo")
@_drafting_flags()
@flags.from_fields(LoadOptions, EngineOptions)
@click.option("--prompts", help="JSONL to measure on what quantisation costs; our own few if unset")
@click.option("--limit", type=click.IntRange(min=1), help="take this many of them, spread over the categories")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def inspect(model: str, as_json: bool, prompts: str | None, limit: int | None, **values: Any) -> None:
    """Say what MODEL is and what can draft for it.

    Architecture, memory, and for each method why it cannot draft, if so; with --quantization, what that costs in
    quality, measured against the model in float32.
    """
    from .inspection import inspect as look

    load_options = flags.pick(LoadOptions, values)
    if prompts is not None:
        from .bench.prompts import read_prompts

        read_prompts(prompts, limit)  # before a model is loaded, for what is wrong with them
    facts = look(model, load_options, flags.pick(EngineOptions, values), _drafting(values))
    quality = _quality(model, load_options, prompts, limit)
    if as_json:
        click.echo(json.dumps(asdict(facts) | {"quality": quality and asdict(quality)}))
        return
    facts.show()
    if quality:
        click.echo(f"against the float model: {quality.describe()}")


@main.command()
@_model_flags
@click.option("--max-tokens", default=96, show_default=True, help="new tokens of each run")
def demo(model: str, max_tokens: int, **values: Any) -> None:
    """Show decoding with and without drafting.

    Ends with both speeds, the mean acceptance length, and whether the texts agree.
    """
    from .terminal import side_by_side

    if not side_by_side(model, max_tokens, flags.given(values)):
        raise SystemExit(1)


def _quality(model: str, options: LoadOptions, prompts: str | None, limit: int | None) -> Any:
    """What quantisation costs, if there is any."""
    if options.quantization == "none":
        if prompts or limit:
            raise OptionError("--prompts and --limit are for measuring what --quantization costs: give that too")
        return None
    from .bench.prompts import read_prompts
    from .bench.quality import measure_quality
    from .models.load import load

    texts = read_prompts(prompts, limit)
    reference = load(model, **asdict(replace(options, quantization="none", dtype="float32")))
    return measure_quality(load(model, **asdict(options)), reference, texts)


def _read_text(file: Any) -> str:
    try:
        return str(file.read())
    except UnicodeDecodeError as error:
        raise OptionError(f"{file.name} is not a text in UTF-8: {error}") from error


def _llm(model: str, values: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Any:
    """config: instead of what the flags say of drafting."""
    from .llm import LLM

    load, engine = flags.pick(LoadOptions, values), flags.pick(EngineOptions, values)
    drafting = _drafting(values) if config is None else config
    llm = LLM(model, speculative_config=drafting, **asdict(load), **asdict(engine))
    click.echo(llm.describe(), err=True)
    return llm


def _drafting(values: Mapping[str, Any]) -> dict[str, Any]:
    """The speculative config: the JSON, then the short flags."""
    config = flags.read_json(values["speculative_config"]) if values.get("speculative_config") else {}
    for parameter, name in ({"method": "method"} | registry.keywords()).items():
        value = values.get(parameter)
        if value is not None and value != ():
            if name in config:
                raise OptionError(f"{name} is given twice, in --speculative-config and as a flag")
            config[name] = value
    return config


def _params(values: Mapping[str, Any], default: Mapping[str, Any] = _SAMPLING_DEFAULTS) -> SamplingParams:
    given = flags.given(values)
    names = {spec.metadata.get("flag", spec.name): spec.name for spec in fields(StructuredOutputsParams)}
    wish = {name: given[flag] for flag, name in names.items() if given.get(flag)}
    wanted = StructuredOutputsParams(**wish) if wish else None
    return flags.pick(SamplingParams, values, structured_outputs=wanted, **default)


def _print_json(llm: Any, prompt: Any, params: SamplingParams, reference: str | None) -> None:
    from .llm import Interrupted

    try:
        completions, status = llm.generate([prompt], params, references=[reference]), 0
    except Interrupted as interrupt:
        completions, status = interrupt.completions, 130
    for one in completions:
        click.echo(json.dumps(asdict(one), ensure_ascii=False))
    if status:
        raise SystemExit(status)


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not line:
            return
        yield line


@main.command()
@_model_flags
@_drafting_flags(several=True, without=["num_speculative_tokens"])
@flags.from_fields(BenchOptions)
def bench(model: str, method: tuple[str, ...], **values: Any) -> None:
    """Measure methods beside plain decoding.

    They take turns on the same prompts. A table, and one JSON document as the last line.
    """
    from .bench import print_report, run_bench
    from .models.load import load

    options = flags.pick(BenchOptions, values)
    config = _drafting({**values, "num_speculative_tokens": None})
    names = method or ((config["method"],) if "method" in config else ("ngram",))
    speculations = registry.parse_each(names, config)
    target = load(model, **asdict(flags.pick(LoadOptions, values)))
    engine = flags.pick(EngineOptions, values)
    if options.profile:
        from .bench.profile import print_profile, run_profile

        print_profile(run_profile(options, target, speculations, engine), target)
    print_report(run_bench(options, target, speculations, engine=engine))


@main.command()
@_name_flag
@flags.from_fields(LoadOptions)
@_drafting_flags()
@flags.from_fields(VerifyOptions)
def verify(model: str, **values: Any) -> None:
    """Prove that drafting changes nothing.

    On your own models, in some minutes; exit status 1 if it does change something.
    """
    from .models.load import load
    from .proof import print_report, run_verify

    speculation = registry.parse(_drafting(values))
    target = load(model, **asdict(flags.pick(LoadOptions, values)))
    report = run_verify(flags.pick(VerifyOptions, values), target, speculation)
    print_report(report)
    if not report.lossless:
        raise SystemExit(1)


@main.command()
@click.argument("what", required=False, type=click.Choice(["layer_skip"]))
@_model_flags
@_drafting_flags(several=True, without=["num_speculative_tokens"])
@flags.from_fields(TuneOptions)
def tune(what: str | None, model: str, method: tuple[str, ...], **values: Any) -> None:
    """Find what pays on your prompts here.

    Every method that fits is measured; the winner goes into a file for --speculative-config @FILE. With layer_skip, the
    layers that the target can do without while it drafts for itself are searched first.
    """
    from .bench.layers import best_layers
    from .bench.tune import fitting, print_ranking, run_tune, with_frequent_tokens
    from .models.load import load

    options, engine = flags.pick(TuneOptions, values), flags.pick(EngineOptions, values)
    config = _drafting({**values, "num_speculative_tokens": None})
    names = method or ((what,) if what else tuple(name for name in registry.methods() if name != "none"))
    registry.check_known(names, config)
    if what and (names != (what,) or {"skip_layers", "exit_layer"} & set(config)):
        raise OptionError(f"tune {what} searches the layers of that method: leave out --method and its options")
    target = load(model, **asdict(flags.pick(LoadOptions, values)))
    if what:
        config |= best_layers(options, target, engine)
    configs, reasons = fitting(target, names, config, engine)
    configs += with_frequent_tokens(options, target, configs, engine)
    choices = run_tune(options, target, [registry.parse(one) for one in configs], configs, engine=engine)
    print_ranking(choices, reasons, options.out)


@main.group()
def train() -> None:
    """Train a head that drafts for a model.

    No data set is needed: the target writes the text. A second start with the same --out goes on where it stopped.
    """


def _training_flags(kind: type[TrainOptions]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    loading = flags.from_fields(LoadOptions, default={"quantization": "int8 on a CPU, none elsewhere"})
    return lambda command: _name_flag(flags.from_fields(kind)(loading(command)))


@train.command()
@_training_flags(Eagle3Options)
def eagle3(model: str, **values: Any) -> None:
    """A small decoder layer that reads the target's states: the stronger head."""
    _train(Eagle3Options, model, values)


@train.command()
@_training_flags(MedusaOptions)
def medusa(model: str, **values: Any) -> None:
    """Heads that each guess one token further ahead: the head that is trained sooner."""
    _train(MedusaOptions, model, values)


def _train(kind: type[TrainOptions], model: str, values: Mapping[str, Any]) -> None:
    from .train import run_train

    if values["out"] is None:
        raise OptionError("give --out: the folder for texts, checkpoints and the head")
    names = {spec.name for spec in fields(LoadOptions)}
    given = {name: value for name, value in flags.given(values).items() if name in names}
    run_train(flags.pick(kind, values), model, given)
