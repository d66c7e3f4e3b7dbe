"""When the events of a step reach their readers."""

import asyncio
from unittest import mock

import pytest

from outrider.serve.run import worker
from tests.serve.services import made, run, task
from tests.world.models import engine


@pytest.mark.parametrize("said", [True, False])
def test_events_are_handed_over_when_the_next_forward_begins_or_else_after_their_step(said, monkeypatch):
    log: list[str] = []
    slow = engine()
    step, post = slow.step, asyncio.BaseEventLoop.call_soon_threadsafe

    def stepped():
        log.append("step")
        found = step()
        log.append("made" if any(update.tokens for update in found) else "nothing made")
        return found

    def posted(loop, call, *arguments, **options):
        if call is worker.Ticket.put:
            log.append("handed over")
        return post(loop, call, *arguments, **options)

    slow.step = stepped
    if not said:
        monkeypatch.setattr(worker, "hand_over_by", lambda call: None)
    with mock.patch.object(asyncio.BaseEventLoop, "call_soon_threadsafe", posted):
        [found] = run(slow, lambda service: made(service, task("a", most=12)))
    assert len(found.tokens) == 12
    order = "".join({"step": "(", "made": ")", "nothing made": "]", "handed over": "!"}[each] for each in log)
    steps = order.count(")")
    assert steps > 2
    if said:
        # All but the last step's events wait for the next step; nobody waits for another step after the last one.
        assert order.count("(!)") == steps - 1
        assert order.endswith(")!")
    else:
        assert order.count(")!") == steps


def test_a_function_that_is_called_between_two_steps_does_not_delay_events():
    slow, seen = engine(), []

    async def work(service):
        [ticket] = service.submit([task("a", most=40)])
        await anext(ticket)
        await asyncio.wrap_future(service._worker.call(lambda: seen.append(list(service._worker._out))))
        ticket.cancel()
        async for _ in ticket:
            pass

    run(slow, work)
    assert seen == [[]]
