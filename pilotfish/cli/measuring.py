"""inspect, bench, verify, tune: commands that look at a model and measure.

It does not know how anything is measured.
"""

import json
from dataclasses import asdict, replace
from typing import Any

import click

from .. import flags
from ..bench.options import BenchOptions, TuneOptions
from ..drafters import registry
from ..engine.options import EngineOptions
from ..errors import OptionError
from ..models.options import LoadOptions
from ..proof.options import VerifyOptions
from .common import drafting_flags, model_flags, name_flag, speculative_config
from .group import main

_json_flag = click.option("--json", "as_json", is_flag=True, help="print one JSON object instead of the table")


@main.command()
@click.argument("model", default="demo")
@drafting_flags()
@flags.from_fields(LoadOptions, EngineOptions)
@click.option("--prompts", help="JSONL to measure on what quantisation costs; our own few if unset")
@click.option("--limit", type=click.IntRange(min=1), help="take this many of them, spread over the categories")
@_json_flag
def inspect(model: str, as_json: bool, prompts: str | None, limit: int | None, **values: Any) -> None:
    """Say what MODEL is and what can draft for it.

    Architecture, memory, and for each method why it cannot draft, if so; with --quantization, what that costs in
    quality, measured against the model in float32.
    """
    from ..inspection import inspect as look

    load_options = flags.pick(LoadOptions, values)
    if prompts is not None:
        from ..bench.prompts import read_prompts

        read_prompts(prompts, limit)  # before a model is loaded, for what is wrong with them
    if load_options.quantization == "none" and (prompts or limit):
        raise OptionError("--prompts and --limit are for measuring what --quantization costs: give that too")
    facts = look(model, load_options, flags.pick(EngineOptions, values), speculative_config(values))
    if not as_json:
        facts.show()  # now, for what follows may take minutes
    quality = _quality(model, load_options, prompts, limit)
    if as_json:
        click.echo(json.dumps(asdict(facts) | {"quality": quality and asdict(quality)}))
    elif quality:
        click.echo(f"against the float model: {quality.describe()}")


def _quality(model: str, options: LoadOptions, prompts: str | None, limit: int | None) -> Any:
    """What quantisation costs, if there is any."""
    if options.quantization == "none":
        return None
    from ..bench.prompts import read_prompts
    from ..bench.quality import measure_quality
    from ..models.load import load

    texts = read_prompts(prompts, limit)
    click.echo(f"measuring what {options.quantization} costs in quality, on {len(texts)} prompts", err=True)
    reference = load(model, **asdict(replace(options, quantization="none", dtype="float32")))
    return measure_quality(load(model, **asdict(options)), reference, texts)


@main.command()
@model_flags
@drafting_flags(several=True, without=["num_speculative_tokens"])
@flags.from_fields(BenchOptions)
@_json_flag
def bench(model: str, method: tuple[str, ...], as_json: bool, **values: Any) -> None:
    """Measure methods beside plain decoding.

    They take turns on the same prompts. A table; in a file or a pipe, one JSON document follows as the last line.
    """
    from ..bench import print_report, run_bench
    from ..bench.prompts import read_prompts
    from ..models.load import load

    options = flags.pick(BenchOptions, values)
    if as_json and options.profile:
        raise OptionError("--json prints one document alone, and --profile prints a table: leave one out")
    config = speculative_config({**values, "num_speculative_tokens": None})
    names = method or ((config["method"],) if "method" in config else ("ngram",))
    speculations = registry.parse_each(names, config)
    read_prompts(options.prompts, options.limit)  # what is wrong with them is said before a model is loaded
    target = load(model, **asdict(flags.pick(LoadOptions, values)))
    engine = flags.pick(EngineOptions, values)
    if options.profile:
        from ..bench.profile import print_profile, run_profile

        print_profile(run_profile(options, target, speculations, engine), target)
    report = run_bench(options, target, speculations, engine=engine)
    print_report(report, as_json=as_json)
    if report.environment["interrupted"]:
        raise SystemExit(130)


@main.command()
@name_flag
@flags.from_fields(LoadOptions)
@drafting_flags()
@flags.from_fields(VerifyOptions)
@_json_flag
def verify(model: str, as_json: bool, **values: Any) -> None:
    """Prove that drafting changes nothing.

    On your own models, in some minutes; exit status 1 if it does change something. A table and a verdict; in a file or
    a pipe, one line of JSON follows.
    """
    from ..bench.prompts import read_prompts
    from ..models.load import load
    from ..proof import print_report, run_verify

    speculation = registry.parse(speculative_config(values))
    options = flags.pick(VerifyOptions, values)
    read_prompts(options.prompts, options.limit)
    target = load(model, **asdict(flags.pick(LoadOptions, values)))
    report = run_verify(options, target, speculation)
    print_report(report, as_json=as_json)
    if not report.lossless:
        raise SystemExit(1)


@main.command()
@click.argument("what", required=False, type=click.Choice(["layer_skip"]))
@model_flags
@drafting_flags(several=True, without=["num_speculative_tokens"])
@flags.from_fields(TuneOptions)
def tune(what: str | None, model: str, method: tuple[str, ...], **values: Any) -> None:
    """Find what pays on your prompts here.

    Every method that fits is measured; the winner goes into a file for --speculative-config @FILE. With layer_skip, the
    layers that the target can do without while it drafts for itself are searched first.
    """
    from ..bench.layers import best_layers
    from ..bench.prompts import read_prompts
    from ..bench.tune import fitting, print_ranking, run_tune, with_frequent_tokens
    from ..models.load import load

    options, engine = flags.pick(TuneOptions, values), flags.pick(EngineOptions, values)
    config = speculative_config({**values, "num_speculative_tokens": None})
    names = method or ((what,) if what else tuple(name for name in registry.methods() if name != "none"))
    registry.check_known(names, config)
    if what and (names != (what,) or {"skip_layers", "exit_layer"} & set(config)):
        raise OptionError(f"tune {what} searches the layers of that method: leave out --method and its options")
    read_prompts(options.prompts, options.limit)
    target = load(model, **asdict(flags.pick(LoadOptions, values)))
    if what:
        config |= best_layers(options, target, engine)
    configs, reasons = fitting(target, names, config, engine)
    configs += with_frequent_tokens(options, target, configs, engine)
    ranked = run_tune(options, target, [registry.parse(one) for one in configs], configs, engine=engine)
    print_ranking(ranked, reasons, options)
    if ranked.interrupted:
        raise SystemExit(130)
