"""Ask a server of a published model the held-out questions, and compare its answers with the workflow's own.

    python workflow_scripts/check_served_model.py --config '{"endpoint": "http://localhost:8000/v1"}'

The server offers OpenAI's chat completions, as vLLM, SGLang, llama.cpp, Ollama and `transformers serve` do. Answers are
decoded greedily. Writes serve_check/answers.jsonl and serve_check/metrics.json into the folder of the run.
"""

import json
from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser, project_imports

with project_imports():
    from dj2mgm.cli.messages import Progress
    from dj2mgm.errors import InputError
    from dj2mgm.features.servers.chat_requests import ChatRequests
    from dj2mgm.features.servers.chat_server import ChatServer
    from dj2mgm.features.servers.served_answers import SCORE, ask_server, compare_answers, read_served_questions
    from dj2mgm.runs.all_runs import Runs
    from dj2mgm.score_groups import DIFFERENCE, OWN
    from dj2mgm.settings.evaluation import GenerateSettings
    from dj2mgm.settings.string_formats import normalize_address
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import write_json, write_jsonl

RETRIES = 3


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--config", type=json.loads, default={}, help="keys of the configuration, as JSON")
    runs = Runs(parser.parse_args().config)
    shared, settings = runs.shared, runs.shared.serve_check
    if not shared.endpoint:
        raise InputError("endpoint: no server is named; add endpoint=http://localhost:8000/v1 to --config")
    experiment = runs.experiments.get_requested("serve_check", "dj_synth")
    run = runs.first_seed(experiment)
    if run.config.model.is_mgm:
        raise InputError(
            f"serve_check: {experiment} trains an MGM, which no server supports; choose an experiment with another "
            "model"
        )
    folder = Path(runs.find_stage_folder(run, "generate"))
    if not (folder / "answers.jsonl").is_file():
        raise InputError(f"serve_check: {experiment} is not finished; run `snakemake {experiment}` first")
    generate = load_settings(GenerateSettings, folder / "config.yaml")
    questions = read_served_questions(Path(f"results/datasets/{run.dataset.name}/evaluation.jsonl"), folder, generate)

    server = ChatServer(
        normalize_address(shared.endpoint),
        settings.model,
        settings.key_variable,
        settings.connections,
        settings.timeout_s,
    )
    requests = ChatRequests(server, RETRIES, max_requests=None, max_total_tokens=None)
    requests.check()
    answers = ask_server(requests, questions, generate.decoding.max_new_tokens, settings.connections)
    served_answers = list(Progress("served answers", len(questions)).follow(answers))
    result = compare_answers(questions, served_answers)
    output = Path(f"results/{run.folder}/serve_check")
    output.mkdir(parents=True, exist_ok=True)
    write_jsonl(
        output / "answers.jsonl",
        (question.row | {"served": text} for question, text in zip(questions, served_answers, strict=True)),
    )
    write_json(output / "metrics.json", {"server": server.name} | result)
    print("\n".join(format_result(result, server.name, experiment)))


def format_result(result: dict, server: str, experiment: str) -> list[str]:
    """Return the share of identical outputs; for answers, also both scores and their difference."""
    kind = "answers" if OWN in result else "captions"
    lines = [
        f"{server}: {100 * result['identical']:.1f} % of {result['answers']} {kind} are identical to {experiment}'s"
    ]
    if OWN in result:
        own_score, served_score, difference = (result[name][SCORE] for name in (OWN, "served", DIFFERENCE))
        interval = ""
        if difference.low is not None:
            interval = f" (95 % interval {100 * difference.low:+.1f} to {100 * difference.high:+.1f})"
        lines.append(
            f"VQA accuracy: served {100 * served_score.mean:.1f} %, own {100 * own_score.mean:.1f} %, difference "
            f"{100 * difference.mean:+.1f} points{interval}"
        )
    return lines


if __name__ == "__main__":
    main()
