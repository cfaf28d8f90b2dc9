"""Mutants of the HTTP source."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENDPOINT = "millpy/sources/http/endpoint.py"
INJECTOR = "millpy/sources/http/injector.py"
OF_HTTP = "tests/unit/sources/test_http.py::"
OF_WORKERS = "tests/unit/sources/test_http_workers.py::"

MUTANTS = [
    Mutant(
        INJECTOR,
        "        self._total += batch.records\n",
        "        self._total += batch.records\n        await self.acknowledge(batch.token)\n",
        killers=(f"{OF_HTTP}test_answer_comes_after_the_commit_and_requests_share_a_bundle",),
        line="HTTP: status 200 comes after the commit, never before",
    ),
    Mutant(
        ENDPOINT,
        "        digest = xxhash.xxh3_64_intdigest(content if key is None else key.encode())\n",
        "        self._turn += 1\n        digest = self._turn // 3\n",
        killers=(f"{OF_WORKERS}test_worker_without_the_partition_passes_a_request_on_or_says_so",),
        line="An HTTP request that is sent again counts once, whichever worker takes it",
    ),
    Mutant(
        INJECTOR,
        "        good = [request for request in taken if not request.bad]\n",
        "        good = taken\n",
        killers=(f"{OF_HTTP}test_bad_record_is_named_and_none_of_its_request_is_taken",),
    ),
    Mutant(
        "millpy/sources/http/relay.py",
        "        raise RefusedRequestError(401, NOT_OURS)\n",
        '        return ""\n',
        killers=(f"{OF_WORKERS}test_worker_without_the_partition_passes_a_request_on_or_says_so",),
    ),
    Mutant(
        "millpy/sources/http/relay.py",
        "            if hmac.compare_digest(self._signature(int(parts[1]), parts[2], key), header):\n",
        "            if parts:\n",
        killers=(f"{OF_WORKERS}test_worker_without_the_partition_passes_a_request_on_or_says_so",),
    ),
    Mutant(
        "millpy/sources/http/relay.py",
        " and abs(self._now() - int(parts[1])) <= _SIGNED_S_MAX:\n",
        ":\n",
        killers=(f"{OF_WORKERS}test_worker_without_the_partition_passes_a_request_on_or_says_so",),
    ),
    Mutant(
        ENDPOINT,
        "        if len(given) > 1 or not all",
        "        if not all",
        killers=("tests/unit/sources/test_http_hostile.py::test_malformed_head_is_refused_and_not_logged_as_a_fault",),
    ),
    Mutant(
        "millpy/sources/http/relay.py",
        '            raise self._no_answer("something else answers at its address")\n',
        "            pass\n",
        killers=(f"{OF_WORKERS}test_success_of_another_program_at_the_address_of_an_owner_is_none",),
    ),
    Mutant(
        "millpy/sources/http/listener.py",
        "        if starts or path in self._left:\n",
        "        if starts:\n",
        killers=(f"{OF_WORKERS}test_only_a_path_that_never_had_a_source_is_not_found",),
    ),
    Mutant(
        ENDPOINT,
        "        if error.is_sent_again:\n",
        "        if error.status == 503:\n",
        killers=(f"{OF_HTTP}test_source_is_not_quiet_while_a_client_will_come_again",),
    ),
    Mutant(
        "millpy/sources/http/tokens.py",
        "        return name if found else None\n",
        '        return name or "anybody"\n',
        killers=(f"{OF_HTTP}test_token_is_needed_and_its_rate_is_bounded",),
    ),
    Mutant(
        ENDPOINT,
        "xxhash.xxh3_64_intdigest(content if key is None else key.encode())",
        "xxhash.xxh3_64_intdigest(content)",
        killers=(f"{OF_HTTP}test_attempts_under_one_key_have_one_partition_whatever_their_bytes",),
    ),
    Mutant(
        "millpy/sources/http/body.py",
        "b'#%d\"' % number for number",
        "b'#%d\"' % (number // 2) for number",
        killers=(f"{OF_HTTP}test_key_of_the_request_numbers_its_records",),
    ),
    Mutant(
        INJECTOR,
        "                self._waiting.remove(waiting)\n",
        "                pass\n",
        killers=(f"{OF_HTTP}test_a_request_that_no_turn_has_taken_in_time_is_never_taken",),
    ),
    Mutant(
        INJECTOR,
        "            if waiting in self._taken:\n",
        "            if False:\n",
        killers=(f"{OF_HTTP}test_requests_are_refused_when_the_turn_fails_or_takes_too_long",),
    ),
    Mutant(
        INJECTOR,
        "        if not self._setup.trusted() or endpoint is None:\n",
        "        if endpoint is None:\n",
        killers=(f"{OF_HTTP}test_a_worker_whose_lease_has_ended_takes_nothing",),
    ),
    Mutant(
        ENDPOINT,
        'send the request again later", retry_after_s=RETRY_S)',
        'send the request again later")',
        killers=(f"{OF_HTTP}test_too_much_that_waits_is_pushed_back",),
    ),
]
