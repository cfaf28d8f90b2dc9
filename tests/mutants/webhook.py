"""Mutants of webhooks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DELIVERY = "millpy/sinks/webhook/delivery.py"
ALONE = "tests/unit/sinks/test_webhook.py::"
RECEIVER = "tests/conformance/test_webhook.py::"
STABLE = "tests/unit/sinks/test_stable_sends.py::test_a_batch_that_comes_again_has_the_same_messages"
BATCHES = "Webhooks: a batch that comes again has the messages of the first"

MUTANTS = [
    Mutant(
        "millpy/sinks/webhook/requests.py",
        "-{messages.positions[place]}",
        "-{place}",
        killers=(f"{ALONE}test_a_request_is_identified_by_the_positions_of_its_messages",),
        line="Webhooks: no message is lost, and what a fault repeats has its known id",
    ),
    Mutant(
        "millpy/sinks/webhook/answers.py",
        "    if 200 <= status < 300:\n",
        "    if 200 <= status < 400:\n",
        killers=(f"{ALONE}test_each_status_has_one_meaning",),
        line="Webhooks: only a status of 2xx counts as delivered",
    ),
    Mutant(
        "millpy/runtime/waiting_rows.py",
        "            if stable:\n",
        "            if False:\n",
        killers=(STABLE,),
        line=BATCHES,
    ),
    Mutant(
        "millpy/runtime/outbox_drain.py",
        "        if (self._stores_positions or stable) and behind:\n",
        "        if self._stores_positions and behind:\n",
        killers=(STABLE,),
        line=BATCHES,
    ),
    Mutant(
        "millpy/runtime/refused_messages.py",
        "                if waiting.position >= before:\n",
        "                if False:\n",
        killers=(STABLE,),
        line=BATCHES,
    ),
    Mutant(
        "millpy/runtime/outbox_drain.py",
        "SendBound(records=1) if self._sink.stable_sends else self._bound",
        "self._bound",
        killers=(STABLE,),
        line=BATCHES,
    ),
    Mutant(
        DELIVERY,
        "        if (self._is_batch or not self._settled) and self._failures >= FAILURES_MAX:\n",
        "        if not self._settled and self._failures >= FAILURES_MAX:\n",
        killers=(
            "tests/unit/sinks/test_webhook.py"
            "::test_an_endpoint_that_goes_away_within_a_batch_is_left_after_as_few_attempts_as_before_it",
        ),
    ),
    Mutant(
        DELIVERY,
        "                    self._reasons |= dict.fromkeys(behind.places, BEHIND)\n                return\n",
        "                    self._reasons |= dict.fromkeys(behind.places, BEHIND)\n",
        killers=(f"{ALONE}test_a_refused_message_holds_its_key_alone",),
        line="Webhooks: the messages of a key arrive in order, and none overtakes a refused one",
    ),
    Mutant(
        "millpy/sinks/webhook/signing.py",
        '    signed = f"{id}.{timestamp}.".encode() + body\n',
        '    signed = f"{id}.".encode() + body\n',
        killers=(f"{ALONE}test_signatures_are_those_of_the_standard",),
        line="Webhooks: a receiver can verify each request",
    ),
    Mutant(
        "millpy/sinks/webhook/connection.py",
        "        if url is None or origin not in self._webhook.hosts:\n",
        "        if url is None or origin is None:\n",
        killers=(f"{RECEIVER}test_a_url_from_a_field_reaches_no_host_that_is_not_named",),
        line="Webhooks: a URL from a field reaches no host that the graph does not name",
    ),
    Mutant(
        DELIVERY,
        "                await self._await_turn()\n",
        "                pass\n",
        killers=(f"{ALONE}test_a_busy_endpoint_is_asked_when_it_wants_to_be",),
    ),
    Mutant(
        "millpy/sinks/webhook/connection.py",
        "headers=headers, allow_redirects=False",
        "headers=headers, allow_redirects=True",
        killers=(f"{RECEIVER}test_what_is_refused_says_why_and_no_redirect_is_followed",),
    ),
    Mutant(
        "millpy/sinks/webhook/connection.py",
        "            trust_env=False,\n",
        "            trust_env=True,\n",
        killers=(f"{RECEIVER}test_no_proxy_and_no_login_of_the_environment_is_used",),
    ),
    Mutant(
        DELIVERY,
        "            self._resumes_at = max(self._resumes_at, resumes_at)\n",
        "            self._resumes_at = resumes_at\n",
        killers=(f"{ALONE}test_the_longest_wait_that_an_endpoint_asks_for_counts",),
    ),
    Mutant(
        "millpy/sinks/webhook/requests.py",
        '"Idempotency-Key": id, ',
        "",
        killers=(f"{ALONE}test_a_request_is_identified_by_the_positions_of_its_messages",),
    ),
    Mutant(
        "millpy/sinks/webhook/requests.py",
        "            found.setdefault(key, []).append(self._single(messages, place))\n",
        "            found.setdefault(key, []).insert(0, self._single(messages, place))\n",
        killers=(f"{ALONE}test_messages_of_a_key_are_in_order_and_others_at_once_within_the_bound",),
    ),
    Mutant(
        "millpy/sinks/webhook/answers.py",
        "return min(float(text), RETRY_AFTER_S_MAX)",
        "return min(float(text) / 1000, RETRY_AFTER_S_MAX)",
        killers=(f"{ALONE}test_retry_after_is_a_number_or_a_date_within_bounds",),
    ),
]
