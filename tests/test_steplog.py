"""The step log: what is written is read, torn tails are cut, damage is found, one process writes."""

import math
import os
import signal
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tezo.optim.estimators.estimate import Probe, StepRecord
from tezo.runs.step_log import MAGIC, StepLog, read_log
from tezo.system.errors import RequestError

HEADER = {"directions": 2, "kinds": ["two-point", "feedback"], "note": "of a test"}
floats = st.floats(allow_nan=True)

pytestmark = pytest.mark.disk


def steps(count: int, directions: int = 2) -> list[StepRecord]:
    def probe(step: int, index: int) -> Probe:
        return Probe(0.5 + step, 0.25 + index, 125.0 + step / 3)

    probes = [tuple(probe(step, index) for index in range(directions)) for step in range(count)]
    return [StepRecord(i, 0.1 * i, 1e-4, probes[i], forward_passes=4) for i in range(count)]


def written(path: Path, logged: list[StepRecord], header: dict = HEADER) -> Path:
    log = StepLog(path, header)
    for step in logged:
        log.append(step)
    log.close()
    return path


def bits(logged: list[StepRecord]) -> list[bytes]:
    """Every number to the bit; a NaN is not equal to itself."""

    def of(record: StepRecord) -> bytes:
        values = [record.loss, record.lr, *(x for p in record.probes for x in (p.loss_plus, p.loss_minus,
                                                                                 p.projected_grad))]  # fmt: skip
        return struct.pack(f"<Q{len(values)}d", record.step, *values)

    return [of(step) for step in logged]


@given(
    st.integers(0, 4).flatmap(
        lambda q: st.tuples(st.just(q), st.lists(st.tuples(floats, floats, st.lists(st.tuples(floats, floats, floats),
                                                 min_size=q, max_size=q)), max_size=6))),
    st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8), max_size=3),
)  # fmt: skip
def test_what_is_written_is_read_to_the_bit(tmp_path_factory, drawn, header):
    directions, rows = drawn
    logged = [
        StepRecord(i, loss, lr, tuple(Probe(*values) for values in probes)) for i, (loss, lr, probes) in enumerate(rows)
    ]
    header = header | {"directions": directions, "kinds": ["two-point"]}
    path = written(tmp_path_factory.mktemp("log") / "steps.log", logged, header)
    found = read_log(path)
    assert (found.header, bits(found.steps)) == (header, bits(logged))
    assert found.valid == found.size == path.stat().st_size


def test_a_log_that_was_closed_goes_on_where_it_ended(tmp_path):
    logged = steps(5)
    path = written(tmp_path / "steps.log", logged[:3])
    written(path, logged[3:])
    assert read_log(path).steps == logged


def test_a_tail_torn_at_any_byte_is_cut_and_the_log_goes_on(tmp_path):
    logged, path = steps(3), tmp_path / "steps.log"
    head = written(path, []).stat().st_size
    whole = written(path, logged).read_bytes()
    size = (len(whole) - head) // 3
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        kept = max(0, end - head) // size
        log = StepLog(path, HEADER)  # which begins again where its own header was not finished
        assert len(log.contents.steps) == log.count == kept
        assert path.stat().st_size == head + kept * size
        for step in logged[kept:]:
            log.append(step)
        log.close()
        assert path.read_bytes() == whole, end


def test_zeros_at_the_end_are_a_tail_as_a_power_cut_leaves_it(tmp_path):
    path = written(tmp_path / "steps.log", steps(3))
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(200))
    found = read_log(path)
    assert found.steps == steps(3) and (found.valid, found.size) == (len(whole), len(whole) + 200)


def test_every_flipped_byte_is_found(tmp_path):
    count, path = 6, tmp_path / "steps.log"
    head = written(path, []).stat().st_size
    whole = written(path, steps(count)).read_bytes()
    size = (len(whole) - head) // count
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        number, in_crc = (place - head) // size, (place - head) % size >= size - 4
        if place < head:
            with pytest.raises(RequestError, match="header is damaged"):
                read_log(path)
        elif number < count - 1 - in_crc:  # a stored CRC speaks for the next record too
            with pytest.raises(RequestError, match=f"damaged after step {number}, with intact entries after"):
                read_log(path)
        else:  # nothing sound after it: a tail, which is cut, and whose steps are taken again
            found = read_log(path)
            assert found.steps == steps(number) and found.valid == head + number * size


def test_records_in_another_order_are_damage(tmp_path):
    path = tmp_path / "steps.log"
    head = written(path, []).stat().st_size
    whole = written(path, steps(5)).read_bytes()
    size = (len(whole) - head) // 5
    parts = [whole[head + i * size : head + (i + 1) * size] for i in range(5)]
    path.write_bytes(whole[:head] + b"".join([parts[0], parts[2], parts[1], *parts[3:]]))
    with pytest.raises(RequestError, match="damaged after step 1"):
        read_log(path)


@pytest.mark.parametrize("text", [b'{"directions": -1}', b'{"directions": 99999}', b'{"directions": "2"}', b"[]", b"{}",
                                  b"\xff\xff", b"[" * 5000, b'{"directions": 2}',
                                  b'{"directions": 2, "kinds": []}', b'{"directions": 2, "kinds": [1]}'])  # fmt: skip
def test_a_forged_header_is_refused(tmp_path, text):
    head = MAGIC + struct.pack("<I", len(text)) + text
    path = tmp_path / "steps.log"
    path.write_bytes(head + struct.pack("<I", zlib.crc32(head)))
    with pytest.raises(RequestError, match="not a step log"):
        read_log(path)


def test_a_header_that_claims_gigabytes_is_refused_before_they_are_read(tmp_path):
    path = tmp_path / "steps.log"
    path.write_bytes(MAGIC + struct.pack("<I", 0xFFFFFFF0) + b"{}")
    with pytest.raises(RequestError, match="not a step log"):
        read_log(path)


@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_read_or_refused(tmp_path_factory, data, begins_well):
    path = tmp_path_factory.mktemp("log") / "steps.log"
    path.write_bytes((MAGIC if begins_well else b"") + data)
    with pytest.raises(RequestError):
        read_log(path)


def test_a_second_writer_is_refused_and_takes_over_when_the_first_is_killed(tmp_path):
    path = tmp_path / "run" / "steps.log"
    path.parent.mkdir()
    reads, writes = os.pipe()
    other = os.fork()
    if other == 0:  # a process of its own, which opens the log and waits to be killed
        StepLog(path, HEADER)
        os.write(writes, b"open")
        signal.pause()
        os._exit(1)
    try:
        assert os.read(reads, 4) == b"open"
        with pytest.raises(RequestError, match=r"another process is writing .*run"):
            StepLog(path, HEADER)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        os.close(reads), os.close(writes)
    assert (path.parent / ".steps.log.lock").exists(), "a process that is killed leaves the file, and not the lock"
    StepLog(path, HEADER).close()
    assert {file.name for file in path.parent.iterdir()} == {"steps.log"}


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        (b"eval", '{"split": "dev", "step": Infinity, "metrics": {}}'),
        (b"eval", '{"split": "dev", "step": 1e999, "metrics": {"loss": 1}}'),
        (b"back", '{"step": Infinity, "to": 0, "lr_scale": 1, "reason": "x"}'),
        (b"back", '{"step": 2, "to": 1, "lr_scale": Infinity, "reason": "x"}'),
        (b"done", '{"steps": 2, "kept": -Infinity}'),
        (b"more", '{"step": 2, "before": 2, "steps": Infinity, "ended": false}'),
        (b"eval", '{"split": "dev", "step": NaN, "metrics": {}}'),
    ],
)
def test_an_infinite_number_in_an_entry_is_no_entry(tmp_path, kind, entry):
    path = written(tmp_path / "steps.log", steps(2))
    whole = path.read_bytes()
    body = kind + struct.pack("<I", len(entry)) + entry.encode()
    crc = zlib.crc32(body, struct.unpack("<I", whole[-4:])[0])
    path.write_bytes(whole + body + struct.pack("<I", crc))
    found = read_log(path)
    assert found.steps == steps(2) and found.valid == len(whole) < found.size


def test_steps_of_several_kinds_are_told_apart(tmp_path):
    drawn, fed = steps(1)[0], StepRecord(1, 0.5, 1e-4, (), "feedback", 3)
    partial = StepRecord(2, 0.5, 1e-4, drawn.probes[:1], forward_passes=2)
    logged = [drawn, fed, partial]
    assert read_log(written(tmp_path / "steps.log", logged)).steps == logged
    with pytest.raises(ValueError, match="gradient"):
        written(tmp_path / "steps.log", [StepRecord(3, 0.5, 1e-4, (), "gradient")])


def test_a_record_of_a_kind_that_the_header_does_not_name_is_no_record(tmp_path):
    path = tmp_path / "steps.log"
    head = written(path, []).stat().st_size
    whole = bytearray(written(path, steps(1)).read_bytes())
    for place in (head + 36, head + 40):  # kind, and number of probes
        forged = whole.copy()
        forged[place] = 99
        forged[-4:] = struct.pack(
            "<I", zlib.crc32(bytes(forged[head:-4]), struct.unpack("<I", whole[head - 4 : head])[0])
        )
        path.write_bytes(forged)
        assert read_log(path).steps == []


def test_evaluations_and_digests_of_files_keep_their_place_and_every_flipped_byte_is_found(tmp_path):
    path = tmp_path / "steps.log"
    log = StepLog(path, HEADER)
    log.append_evaluation("test", 0, {"loss": 0.1 + 0.2, "f1": math.nan}, ["good", "\udcff\n"])
    log.append_file("basis-0.safetensors", "00ff")
    log.append(steps(1)[0])
    log.append_evaluation("dev", 1, {"loss": 0.25})
    log.append_file("basis-0.safetensors", "00ff")  # known already
    log.append_evaluation("dev", 1, {"loss": 0.25})
    end = path.stat().st_size
    log.append(steps(2)[1])
    log.close()
    found, whole = read_log(path), path.read_bytes()
    assert found.evaluations[("test", 0)]["loss"] == 0.1 + 0.2
    assert math.isnan(found.evaluations[("test", 0)]["f1"])
    assert (found.evaluations[("dev", 1)], found.files) == ({"loss": 0.25}, {"basis-0.safetensors": "00ff"})
    assert (found.answers, found.steps) == ({("test", 0): ["good", "\udcff\n"]}, steps(2))
    for place in range(end - 4):  # the stored CRC before the last entry speaks for it too
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(RequestError, match="damaged"):
            read_log(path)


def test_a_log_made_to_take_long_is_refused_soon(tmp_path):
    path = written(tmp_path / "steps.log", [])
    entry = b"step" + struct.pack("<I", (1 << 20) - 64)
    path.write_bytes(path.read_bytes() + bytes(8) + entry * (1 << 18))
    with pytest.raises(RequestError, match="damaged after step 0"):
        read_log(path)  # without a bound on the search, hours
