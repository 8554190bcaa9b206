"""The data of the page: list and details of runs, curves by offset, thinning, events, pictures and the stream."""

import asyncio
import io
import json
import os
import shutil
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("orjson")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from served import make_run, row_of, unpack
from unfog.data.data_report import CAPTION_FILES
from unfog.process.console_log import console_log
from unfog.process.run_folder import RunFolder
from unfog.process.run_status import RunStatus
from unfog.reporting.page.run_data import read_data_report
from unfog.reporting.progress import say
from unfog.serve.metric_columns import REDUCTIONS, MetricColumns, Thinner
from unfog.serve.run_files import read_webp
from unfog.serve.runs import RunList
from unfog.serve.server import Hub, Server

with warnings.catch_warnings():  # which client it uses is nothing to us
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

from unfog.serve.run_routes import build_app


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "runs" / "a")


@pytest.fixture
def server(run):
    return Server(run.parent)


@pytest.fixture
def client(server):
    return TestClient(build_app(server, []), raise_server_exceptions=False)


def number(client, name="a"):
    return next(row["id"] for row in client.get("/api/runs").json() if row["name"] == name)


def append(run, rows):
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row_of(i)) + "\n" for i in rows)


def test_the_list_names_runs_by_numbers_and_tells_their_state(client, run):
    (run.parent / "photos").mkdir()
    (row,) = client.get("/api/runs").json()
    assert (row["name"], row["state"], row["step"], row["steps"]) == ("a", "finished", 40, 40)
    assert (row["metric"], row["best"], row["best_step"]) == ("held_out_loss", 0.0, 20)
    assert row["age"] < 60
    assert str(run.parent) not in json.dumps(row)


def test_the_newest_run_that_can_draw_is_listed_first(client, run):
    def placed(name, age, checkpoint=False, config=""):
        folder = run.with_name(name)
        shutil.copytree(run, folder)
        (folder / "config.toml").write_text(config)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        if checkpoint:
            (folder / "checkpoints" / "00000040").mkdir(parents=True)
            (folder / "checkpoints" / "00000040" / "manifest.json").write_text("{}")
        for file in folder.iterdir():
            os.utime(file, (time.time() - age,) * 2)

    placed("old", 900, checkpoint=True)
    placed("drawn", 600, checkpoint=True)
    placed("autoencoder", 500, checkpoint=True, config="[autoencoder]\nfactor = 4\n")
    placed("begun", 400)
    shutil.rmtree(run)
    assert [row["name"] for row in client.get("/api/runs").json()] == ["drawn", "begun", "autoencoder", "old"]


def test_a_page_that_polls_sees_new_runs_and_new_steps_without_a_stream(client, run, monkeypatch):
    monkeypatch.setattr("unfog.serve.server._TICK_SECONDS", 0)
    assert [row["step"] for row in client.get("/api/runs").json()] == [40]
    append(run, [50])
    make_run(run.parent / "b", rows=3)
    assert [row["step"] for row in client.get("/api/runs").json()] == [3, 50]  # the newest first


@pytest.mark.slow
def test_a_long_record_is_seen_in_a_sample_until_all_of_it_was_read(client, run, monkeypatch):
    monkeypatch.setattr("unfog.serve.runs.LONG", 100_000)
    monkeypatch.setattr("unfog.serve.metric_columns._PLACES", 20)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row_of(i)) + "\n" for i in range(10, 60_010, 10)))
    address = f"/api/runs/{number(client)}"
    detail = client.get(address).json()
    assert detail["sampled"]
    assert detail["rows"] == pytest.approx(6000, rel=0.02)
    assert "loss_by_level.1" in detail["columns"]
    head, part = unpack(client.get(f"{address}/thinned?sample=1&columns=step,loss&points=4000").content)
    assert head["sampled"]
    assert 200 < head["rows"] < 2000
    assert (part["step"][0], part["step"][-1]) == (10, 60_000)
    assert np.diff(part["step"]).min() > 0
    assert len(client.get(f"{address}/thinned?columns=loss&points=4000").content) > 6000 * 8  # all of them
    head, whole = unpack(client.get(f"{address}/thinned?sample=1&columns=step,loss&points=4000").content)
    assert "sampled" not in head
    assert dict(zip(part["step"], part["loss"])).items() <= dict(zip(whole["step"], whole["loss"])).items()
    assert not client.get(address).json()["sampled"]


def test_many_pages_ask_while_the_runs_are_still_being_read(run, monkeypatch):
    read, server = RunStatus.read, Server(run.parent)

    def slowly(*args):
        time.sleep(0.2)
        return read(*args)

    monkeypatch.setattr(RunStatus, "read", slowly)
    (entry,) = server.runs
    with ThreadPoolExecutor(4) as pool:
        assert [row["step"] for row in pool.map(lambda _: entry.as_json(), range(4))] == [40] * 4


def test_new_runs_are_found_and_keep_their_numbers(server, run):
    before = {one.name: one.id for one in server.runs}
    make_run(run.parent / "deep" / "b", rows=3)
    assert server.runs.scan()
    assert not server.runs.scan()
    names = {one.name: one.id for one in server.runs}
    assert sorted(names) == ["a", "deep/b"]
    assert names["a"] == before["a"]
    other = RunList(run.parent)
    other.scan()
    assert {one.name: one.id for one in other} == names


def test_a_run_says_its_settings_choices_previews_and_commands(client, run):
    detail = client.get(f"/api/runs/{number(client)}").json()
    assert detail["settings"]["source"] == "fashion"
    assert detail["choices"] == [{"setting": "lr", "value": "1", "reason": "r"}]
    assert detail["previews"] == [10, 20]
    assert (detail["rows"], detail["checkpoints"], detail["findings"]) == (40, [], None)
    assert {"step", "loss", "loss_by_level.1", "held_out_loss"} <= set(detail["columns"])
    assert detail["commands"]["resume"] == f"unfog resume {run}"


def test_settings_that_differ_from_the_defaults_are_named(client, run):
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("label_dropout = 0.1", "label_dropout = 0.25"))
    changed = client.get(f"/api/runs/{number(client)}").json()["changed"]
    assert changed["label_dropout"] == [0.1, 0.25]
    assert "source" not in changed


def test_a_run_that_is_watched_has_its_settings_and_data_report_read_once(client, run, monkeypatch):
    (run / "data.json").write_text('{"images": 3, "files": []}')
    at, opened = f"/api/runs/{number(client)}", []
    assert client.get(at).json()["data"]["fields"]["images"] == "3"
    open_ = os.open
    monkeypatch.setattr(os, "open", lambda path, *a, **k: opened.append(str(path)) or open_(path, *a, **k))
    append(run, [40])
    assert client.get(at).json()["rows"] == 41
    assert "metrics.jsonl" in opened
    assert not {"config.toml", "data.json"} & set(opened)
    monkeypatch.undo()
    (run / "data.json").write_text('{"images": 44, "files": []}')
    assert client.get(at).json()["data"]["fields"]["images"] == "44"


def test_a_data_report_shows_neither_digests_nor_what_is_empty(run):
    stored = {"used": 3, "values": "", "unused_pages": 0, "modes": {}, "columns": {"text": ["fe", "ac"]}, "files": []}
    (run / "data.json").write_text(json.dumps(stored))
    assert read_data_report(run, [])["fields"] == {"used": "3", "columns": "text"}


def test_a_data_report_counts_captions_and_names_the_kinds_of_columns(run):
    ignored = {CAPTION_FILES: 40, ".csv": 1}
    (run / "data.json").write_text(json.dumps({"ignored": ignored, "columns": {"text": [], "age": []}, "files": []}))
    (run / "config.toml").write_text('columns = [{name = "text", kind = "text"}, 7, {name = "age", kind = "number"}]')
    fields = {"ignored": ".csv 1", "columns": "text (text), age (number)", "captions": "40"}
    assert read_data_report(run, [])["fields"] == fields
    (run / "config.toml").write_text("columns = [")
    assert read_data_report(run, [])["fields"] == {**fields, "columns": "text, age"}


def test_columns_of_runs_that_were_not_asked_for_longest_are_dropped(tmp_path, monkeypatch):
    for name in "abc":
        make_run(tmp_path / "runs" / name, rows=2000)
    runs = Server(tmp_path / "runs").runs
    first, second, third = runs
    for one in (first, second):
        runs.read_columns(one)
        one.thinner.thin("step", ["loss"], -np.inf, np.inf, 50)
    assert first.memory > first.columns.memory > 8 * 2000
    monkeypatch.setattr("unfog.serve.runs._MOST_MEMORY", 3 * first.memory)
    runs.read_columns(first)
    runs.read_columns(third)
    assert [one.columns.rows for one in (first, second, third)] == [2000, 2000, 2000]
    monkeypatch.setattr("unfog.serve.runs._MOST_MEMORY", sum(one.memory for one in runs) - 1)
    runs.read_columns(third)
    assert [one.columns.rows for one in (first, second, third)] == [2000, 0, 2000]


def test_only_new_rows_travel(client, run):
    at = f"/api/runs/{number(client)}/metrics?columns=step,loss,loss_by_level.2,unknown"
    first, columns = unpack(client.get(at).content)
    assert (first["rows"], first["from"], first["reset"]) == (40, 0, False)
    assert columns["loss"].tolist() == [1 / (i + 1) for i in range(40)]
    assert np.isnan(columns["loss_by_level.2"]).all()
    assert np.isnan(columns["unknown"]).all()
    append(run, [40, 41])
    second, columns = unpack(client.get(f"{at}&from={first['offset']}&identity={first['identity']}").content)
    assert (second["rows"], second["reset"], columns["step"].tolist()) == (2, False, [40, 41])
    third, columns = unpack(client.get(f"{at}&from={second['offset']}&identity={second['identity']}").content)
    assert (third["rows"], third["offset"], third["reset"]) == (0, second["offset"], False)


def test_a_torn_line_waits_until_it_is_whole(client, run):
    at = f"/api/runs/{number(client)}/metrics?columns=step"
    before, _ = unpack(client.get(at).content)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')
        file.flush()
        torn, _ = unpack(client.get(f"{at}&from={before['offset']}").content)
        assert (torn["rows"], torn["offset"]) == (0, before["offset"])
        file.write('ss": 0.5}\n')
        file.flush()
    _, columns = unpack(client.get(f"{at}&from={before['offset']}").content)
    assert columns["step"].tolist() == [40]


@pytest.mark.parametrize("longer", [False, True])
def test_rows_that_a_resume_takes_back_are_told(client, run, longer):
    """A resume cuts the file at its checkpoint. By the next look it may be shorter, or as long and another."""
    at = f"/api/runs/{number(client)}/metrics?columns=step,loss"
    before, _ = unpack(client.get(at).content)
    lines = (run / "metrics.jsonl").read_text().splitlines()[:30]
    lines += [json.dumps({"step": 30 + i, "loss": 9.0}) for i in range(90 if longer else 2)]
    size = (run / "metrics.jsonl").stat().st_size
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert ((run / "metrics.jsonl").stat().st_size > size) == longer
    after, columns = unpack(client.get(f"{at}&from={before['offset']}&identity={before['identity']}").content)
    assert after["reset"]
    assert after["rows"] == (120 if longer else 32)
    assert columns["loss"][30] == 9.0


def test_another_file_at_the_same_place_is_told_without_an_identity_too(client, run):
    at = f"/api/runs/{number(client)}/metrics?columns=step"
    before, _ = unpack(client.get(at).content)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    after, columns = unpack(client.get(f"{at}&from={before['offset']}").content)
    assert after["reset"]
    assert columns["step"].tolist() == [1]


DAMAGED = [
    b"not json\n",
    b"[1, 2]\n",
    b"\xff\xfe\n",
    b"\n",
    b'{"step": 1}, {"step": 2}\n',
    b"[" * 100_000 + b"\n",
    b"{}\n",
]


@pytest.mark.parametrize("line", DAMAGED)
def test_lines_that_are_damaged_cost_no_other(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b'{"step": 2}\n')
    columns = MetricColumns(path)
    columns.update()
    steps = columns.column("step")
    assert steps[np.isfinite(steps)].tolist() == [0, 2]
    assert columns.offset == path.stat().st_size


def test_values_that_are_no_numbers_become_gaps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    values = ["1", True, None, {"a": 1}, [], float("inf"), float("nan"), 1e200, 10**400, 0.5]
    path.write_text("".join(json.dumps({"v": value}) + "\n" for value in values))
    columns = MetricColumns(path)
    columns.update()
    assert columns.column("v")[-1] == 0.5
    assert np.isnan(columns.column("v")[:-1]).all()


def test_a_column_that_comes_late_begins_with_gaps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n')
    columns = MetricColumns(path)
    columns.update()
    path.write_text('{"a": 1}\n{"b": 2}\n')
    columns.update()
    assert columns.column("b").tolist()[1:] == [2]
    assert np.isnan(columns.column("b")[0])
    assert np.isnan(columns.column("a")[1])


def test_a_file_of_a_stranger_takes_a_limited_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("unfog.serve.metric_columns._MOST_COLUMNS", 10)
    monkeypatch.setattr("unfog.serve.metric_columns._MOST_CELLS", 1000)
    monkeypatch.setattr("unfog.serve.metric_columns._BLOCK", 4096)
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for i in range(5000):
            file.write(json.dumps({f"name {i % 50}": i, "x" * 200: 1, "list": list(range(100))}) + "\n")
        file.write('{"a": "' + "x" * 10_000 + '"}\n')
    columns = MetricColumns(path)
    columns.update()
    assert len(columns.names) == 10
    assert columns.rows < 300


def test_a_new_name_in_each_line_costs_no_look_at_all_lines(tmp_path, monkeypatch):
    path, looks = tmp_path / "metrics.jsonl", []
    path.write_text("".join(json.dumps({f"{i} {j}": "text" for j in range(20)}) + "\n" for i in range(500)))
    columns = MetricColumns(path)
    append = columns._append_values
    monkeypatch.setattr(columns, "_append_values", lambda *args: looks.append(args[0]) or append(*args))
    columns.update()
    assert columns.rows == 500
    assert len(looks) == 256


def test_reading_costs_as_much_as_there_are_new_lines(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row_of(i)) + "\n" for i in range(5000)))
    columns, read = MetricColumns(path), []
    columns.update()
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read.append(len(got := pread(*args))) or got)
    columns.update()
    assert sum(read) <= 256
    with path.open("a") as file:
        file.write(json.dumps(row_of(5000)) + "\n")
    read.clear()
    columns.update()
    assert columns.rows == 5001
    assert sum(read) < 1024


def thinner_of(tmp_path, rows, values):
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"step": i, "loss": float(v)}) + "\n" for i, v in zip(rows, values))
    columns = MetricColumns(path)
    columns.update()
    return path, columns, Thinner(columns)


def test_thinning_keeps_every_extreme_and_grows_with_the_file(tmp_path):
    values = np.sin(np.arange(5000) / 70)
    values[[777, 3333]] = 50, -50
    path, columns, thinner = thinner_of(tmp_path, range(5000), values)
    for more in (0, 1, 500, 4096):
        if more:
            at = columns.rows
            with path.open("a") as file:
                file.writelines(json.dumps({"step": at + i, "loss": 60.0 + i}) + "\n" for i in range(more))
            columns.update()
        found = thinner.thin("step", ["loss"], -np.inf, np.inf, 100)
        every = columns.column("loss")
        blocks = [every[i : i + found.block] for i in range(0, len(every), found.block)]
        assert 50 <= len(blocks) <= 100
        assert found.columns["loss.min"].tolist() == [block.min() for block in blocks]
        assert found.columns["loss.max"].tolist() == [block.max() for block in blocks]
        assert found.columns["loss.last"].tolist() == [block[-1] for block in blocks]
        assert found.columns["loss.mean"] == pytest.approx([block.mean() for block in blocks])
        assert found.columns["step"][-1] == columns.column("step")[-1]


def test_zooming_gives_the_rows_themselves(tmp_path):
    values = np.random.default_rng(0).normal(size=5000)
    _, _, thinner = thinner_of(tmp_path, range(5000), values)
    found = thinner.thin("step", ["loss"], 1000, 1100, 100)
    assert found.block == 1
    assert found.columns["step"].tolist() == list(range(999, 1102))  # one more at each edge
    assert found.columns["loss"].tolist() == values[999:1102].tolist()
    part = thinner.thin("step", ["loss"], 1000, 3000, 100)
    assert part.block > 1
    assert part.columns["loss.max"].max() >= values[1000:3001].max()


def test_gaps_are_not_counted_as_extremes(tmp_path):
    path, columns, thinner = thinner_of(tmp_path, range(1000), np.arange(1000.0))
    path.write_text("".join(json.dumps({"step": i, "loss": None if i % 2 else i}) + "\n" for i in range(1000)))
    columns.update()
    found = thinner.thin("step", ["loss", "never"], -np.inf, np.inf, 20)
    assert found.columns["loss.last"][-1] == 998
    assert np.isnan(found.columns["never.max"]).all()


def test_a_pyramid_costs_as_much_as_there_are_new_rows(tmp_path, monkeypatch):
    path, columns, thinner = thinner_of(tmp_path, range(20_000), np.arange(20_000))
    thinner.thin("step", ["loss"], -np.inf, np.inf, 100)
    reduced = []
    counting = [lambda blocks, reduce=reduce: reduced.append(blocks.size) or reduce(blocks) for reduce in REDUCTIONS]
    monkeypatch.setattr("unfog.serve.metric_columns.REDUCTIONS", counting)
    with path.open("a") as file:
        file.writelines(json.dumps({"step": 20_000 + i, "loss": i}) + "\n" for i in range(32))
    columns.update()
    thinner.thin("step", ["loss"], -np.inf, np.inf, 100)
    assert 0 < sum(reduced) < 5 * 2 * (32 + 40 + 256)  # the new blocks of each level, and the unfinished one


def test_thinned_columns_over_http(client, run):
    append(run, range(40, 2000))
    at = f"/api/runs/{number(client)}/thinned?x=step&columns=loss&points=50"
    header, columns = unpack(client.get(at).content)
    assert set(columns) == {"step", "loss.min", "loss.max", "loss.mean", "loss.last"}
    assert columns["loss.max"][0] == 1
    every = unpack(client.get(f"{at.replace('columns=loss&', '')}&low=&high=").content)[1]
    assert every["loss.max"].tolist() == columns["loss.max"].tolist()
    header, columns = unpack(client.get(f"{at}&low=100&high=110").content)
    assert (header["block"], set(columns)) == (1, {"step", "loss"})
    assert client.get(f"{at}&low=nan").status_code == 400


def test_events_have_causes_and_remedies_and_travel_once(client, run):
    at = f"/api/runs/{number(client)}/events"
    first = client.get(at).json()
    refused = next(row for row in first["events"] if row["kind"] == "step_refused")
    assert "conv" in refused["cause"]
    assert refused["remedy"]
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind": "preview", "step": 41}\n{"kind": "torn"')
    second = client.get(f"{at}?from={first['offset']}").json()
    assert [row["kind"] for row in second["events"]] == ["preview"]
    assert not second["reset"]
    assert client.get(f"{at}?from={second['offset']}").json()["events"] == []


def test_events_that_a_resume_undid_are_left_out(client, run):
    at = f"/api/runs/{number(client)}/events"
    first = client.get(at).json()
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind": "resumed", "step": 2}\n')
    second = client.get(f"{at}?from={first['offset']}").json()
    assert second["reset"]
    assert "step_refused" not in [row["kind"] for row in second["events"]]


def test_pictures_are_encoded_anew(client, run):
    at = f"/api/runs/{number(client)}/preview/10.webp"
    answer = client.get(at)
    assert answer.headers["content-type"] == "image/webp"
    picture = np.asarray(Image.open(io.BytesIO(answer.content)))
    assert picture.tolist() == np.full((8, 12, 3), 10).tolist()
    assert client.get(at, headers={"if-none-match": answer.headers["etag"]}).status_code == 304
    assert client.get(f"/api/runs/{number(client)}/preview/11.webp").status_code == 404
    assert client.get(f"/api/runs/{number(client)}/contact-sheet.webp").status_code == 404


def test_texts_and_scripts_in_a_picture_are_not_passed_on_cve_2026_56670(tmp_path):
    from PIL.PngImagePlugin import PngInfo

    texts = PngInfo()
    texts.add_text("Comment", "<script>alert(1)</script>")
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG", pnginfo=texts)
    assert b"<script>" in file.getvalue()
    (tmp_path / "a.png").write_bytes(file.getvalue() + b"<script>")
    assert b"script" not in read_webp(tmp_path / "a.png", tmp_path)


def test_the_stream_greets_replays_and_replaces():
    """A browser that comes back gets what it missed; of two events about one thing, the later."""

    async def listen():
        hub = Hub()
        hub.start()
        hub.greet = lambda: [("runs", {"count": 3}, "runs")]
        stream = hub.listen()
        got = [await anext(stream), await anext(stream)]
        for i in range(5):
            hub.publish("run", {"id": 1, "metrics": i}, "run 1")
        hub.publish("run", {"id": 2, "metrics": 9}, "run 2")
        await asyncio.sleep(0.01)
        got += [await anext(stream), await anext(stream)]
        last = got[-1].split(b"\n")[0].removeprefix(b"id: ").decode()
        await stream.aclose()
        assert not hub.listened_to
        hub.publish("run", {"id": 1, "metrics": 100}, "run 1")
        await asyncio.sleep(0.01)
        again = hub.listen(last)
        missed = [await anext(again), await anext(again)]
        other = hub.listen("gone-7")
        greeted = [await anext(other), await anext(other)]
        return got, missed, greeted

    got, missed, greeted = asyncio.run(listen())
    assert [b'"count": 3' in part for part in got] == [False, True, False, False]
    assert b'"metrics": 4' in got[2]
    assert b'"metrics": 9' in got[3]
    assert b'"metrics": 100' in missed[1]
    assert b'"count": 3' in greeted[1]


def test_too_many_streams_end_the_oldest(monkeypatch):
    monkeypatch.setattr("unfog.serve.server._MOST_CLIENTS", 2)

    async def listen():
        hub = Hub()
        hub.start()
        streams = [hub.listen() for _ in range(3)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(streams[0])
        hub.close()
        for stream in streams[1:]:
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        return hub.listened_to

    assert not asyncio.run(listen())


def test_the_watcher_says_what_has_grown(server, run):
    published = []
    server.hub.publish = lambda event, data, key="": published.append((event, data))
    for _ in range(5):
        server.tick()
    published.clear()
    for _ in range(5):
        server.tick()
    assert published == []
    append(run, [40])
    Image.new("RGB", (4, 4)).save(run / "samples" / "00000030.png")
    for _ in range(5):
        server.tick()
    ((event, data),) = published
    assert (event, data["previews"]) == ("run", 3)
    assert data["metrics"] == (run / "metrics.jsonl").stat().st_size


def test_a_running_run_is_looked_at_each_tick_and_its_death_is_noticed(server, run):
    beat = {"time": "2026-01-01T00:00:00+00:00", "pid": os.getpid(), "host": os.uname().nodename, "next": 5}
    beat |= {"step": 12, "steps": 40, "doing": "training"}

    def write(**more):
        now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        (run / "heartbeat.json").write_text(json.dumps(beat | {"time": now} | more))

    (run / "events.jsonl").write_text('{"kind": "started", "step": 0, "steps": 40}\n')
    write()
    for _ in range(5):
        server.runs.tick()
    (entry,) = server.runs
    assert entry.running
    row = entry.as_json()
    assert 10**6 < row["memory"] < 10**11  # of this process
    assert row["free"] == pytest.approx(shutil.disk_usage(run).free, rel=0.1)
    write(host="another")
    assert "memory" not in entry.as_json()
    write(step=13)
    os.utime(run / "heartbeat.json", (1, 1))
    assert server.runs.tick() == [entry]
    dead = threading.Thread(target=lambda: None)
    dead.start()
    write(pid=2**22 + 1)
    server.runs.tick()
    assert entry.status.state == "killed"


def test_messages_of_a_run_that_was_started_elsewhere_are_shown_and_their_growth_told(client, server, run):
    assert client.get(f"/api/runs/{number(client)}").json()["output"] is None
    with console_log(RunFolder(run)):
        say("scanned 40 images from https://bob:secret@host/a.tar")
    address = client.get(f"/api/runs/{number(client)}").json()["output"]
    lines = client.get(f"/{address}").json()["output"].splitlines()
    assert lines[0].startswith("-- 20")
    assert lines[1].startswith("scanned 40 images from https://")
    assert "secret" not in lines[1]
    published = []
    server.hub.publish = lambda event, data, key="": published.append(data)
    for _ in range(5):
        server.tick()
    assert published[-1]["console"] == (run / "console.log").stat().st_size


def test_a_log_of_messages_keeps_the_newer_half_and_what_ended_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("unfog.process.console_log._MOST_BYTES", 2000)
    folder = RunFolder(tmp_path)
    with console_log(folder):
        say("before it is a run")
        assert not (tmp_path / "console.log").exists()
        folder.config_file.touch()
        say("now it is")
        assert (tmp_path / "console.log").read_text().splitlines()[1:] == ["before it is a run", "now it is"]
        for i in range(200):
            say(f"message {i}")
            assert (tmp_path / "console.log").stat().st_size <= 2000
    text = (tmp_path / "console.log").read_text()
    assert text.splitlines()[-1] == "message 199"
    assert text.startswith("message ")
    with pytest.raises(ValueError, match="odd"), console_log(folder):
        raise ValueError("odd")
    assert (tmp_path / "console.log").read_text().endswith("unfog: odd\n")
    (tmp_path / "console.log").unlink()
    (tmp_path / "console.log").symlink_to(tmp_path / "elsewhere")
    with console_log(folder):
        say("not through a link")
    assert not (tmp_path / "elsewhere").exists()


ODD = ["null", "[]", "{}", '"x"', "1e400", "-1", "NaN", "true", "1" + "0" * 400, "[" * 3000 + "]" * 3000]
ODD += ['{"a":' * 300 + "1" + "}" * 300, '"\\ud800"', "1e99", "[[1,null],{}]"]
USUAL = {
    "heartbeat.json": {"time": '"2026-11-24T07:00:00+00:00"', "pid": "1", "host": '"h"', "next": "5", "doing": '"x"'},
    "events.jsonl": {"time": '"t"', "step": "1", "kind": '"failed"', "reason": '"x"', "steps": "3"},
    "metrics.jsonl": {"step": "1", "seconds": "1", "loss": "1", "held_out_loss": "1"},
}
FILES = ("heartbeat.json", "data.json", "evaluations/1.json", "checkpoints/00000001/manifest.json", "findings.json")
TOML = ["x = 1979-05-27", "source = 3", "source = [1979-05-27]", "a = " + "[" * 2000, "classes = [1979-05-27, {a=1}]"]
TOML += [
    "\xff",
    "x = inf",
    "evaluate = 3",
    "[[a]]\nu='https://a:b@c.d/'",
    "source = 'a\\u0000b'",
    "[evaluate]\nbest=['fid']",
]


def odd_files():
    """(file of a run, content) in which a value is other than what anybody would write."""
    for odd in ODD:
        for name, usual in USUAL.items():
            for key in usual:
                fields = ",".join(f'"{other}":{value}' for other, value in (usual | {key: odd}).items())
                yield name, "{" + fields + "}\n"
        yield from ((name, odd) for name in FILES)
    yield from (("config.toml", text) for text in TOML)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_with_anything_in_its_files_breaks_no_list_and_no_page(tmp_path):
    for i, (name, text) in enumerate(odd_files()):
        path = make_run(tmp_path / "runs" / f"{i:03}", rows=3) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    server = Server(tmp_path / "runs")
    client = TestClient(build_app(server, []))
    rows = client.get("/api/runs").json()
    assert len(rows) == sum(1 for _ in odd_files())
    assert not [row for row in rows if row["state"] == "unreadable"]
    for row, (name, _) in zip(sorted(rows, key=lambda row: row["name"]), odd_files()):
        for at in ("", "/events", *(["/metrics", "/thinned?points=1"] if name == "metrics.jsonl" else [])):
            assert client.get(f"/api/runs/{row['id']}{at}").status_code == 200
    server.tick(everything=True)
    assert client.get("/api/state").status_code == 200


def test_links_that_lead_out_are_not_followed_cve_2023_6909(server, run, tmp_path):
    """A run folder may hold a link under any name; so may the folder of runs."""
    outside = make_run(tmp_path / "outside")
    os.symlink(outside, run.parent / "link")
    for name in ("metrics.jsonl", "events.jsonl", "config.toml"):
        (run / name).unlink()
        os.symlink(outside / name, run / name)
    os.rename(run / "samples", run / "old")
    os.symlink(outside / "samples", run / "samples")
    client = TestClient(build_app(server, []), raise_server_exceptions=False)
    server.runs.scan()
    assert [one.name for one in server.runs] == ["a"]
    detail = client.get(f"/api/runs/{number(client)}").json()
    assert (detail["settings"], detail["rows"], detail["previews"]) == ({}, 0, [])
    assert client.get(f"/api/runs/{number(client)}/preview/10.webp").status_code in (404, 422)
    assert client.get(f"/api/runs/{number(client)}/events").json()["events"] == []
