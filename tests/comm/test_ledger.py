"""Ledgers count what runs while they are open, also when several are."""

import threading
from fractions import Fraction

from shardwise.comm import Sent, counting
from shardwise.comm import ledger as ledgers
from shardwise.comm.ledger import is_counting, record

ENTRY = Sent("all-gather", "all_gather", ("tp",), 4, Fraction(12))


def test_a_ledger_counts_while_it_is_open():
    assert not is_counting()
    with counting() as ledger:
        assert is_counting()
        record(ENTRY)
        record(ENTRY)
    record(ENTRY)
    assert (ledger.collectives, ledger.bytes, is_counting()) == (2, 24, False)


def test_the_inner_of_two_equal_ledgers_is_closed_first():
    with counting() as outer:
        with counting() as inner:
            record(ENTRY)
        record(ENTRY)
    assert (outer.collectives, inner.collectives) == (2, 1)


def test_where_ranks_are_threads_each_counts_its_own(monkeypatch):
    monkeypatch.setattr(ledgers, "ranks_are_threads", lambda: True)
    counts, ready = {}, threading.Barrier(3)

    def rank(number):
        with counting() as ledger:
            ready.wait()
            for _ in range(number):
                record(ENTRY)
            ready.wait()
        counts[number] = ledger.collectives

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert counts == {0: 0, 1: 1, 2: 2}
