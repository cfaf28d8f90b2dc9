"""Mutants of the page and of what keeps it safe: who may act, what a browser may do, how foreign text is shown."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AUTHENTICATION = "millpy/api/authentication.py"
LIMITS = "millpy/api/limits.py"
LOGIN = "millpy/ui/login.py"
QUERIES = "millpy/admin/queries.py"
RENDERING = "millpy/ui/rendering.py"
SESSIONS = "millpy/api/sessions.py"
OF_ACCESS = "tests/conformance/test_api_access.py::"
OF_LIMITS = "tests/unit/test_api_limits.py::"
OF_PAGE = "tests/conformance/test_page.py::"
OF_TABLES = "tests/conformance/test_page_tables.py::"
OF_VALUES = "tests/unit/ui/test_values.py::"
FORMS = (f"{OF_TABLES}test_no_action_without_the_role_and_the_token_of_the_form",)
HEADERS = (f"{OF_ACCESS}test_answers_have_headers_that_keep_browsers_safe",)
OPENED = '        httponly=True,\n        samesite="strict",\n        secure=gate.is_encrypted(request),\n    )'
ROW_LEVEL_SECURITY = (f"{OF_ACCESS}test_row_level_security_holds_for_a_token_with_a_role_of_the_database",)
SESSION = (f"{OF_ACCESS}test_a_session_reads_and_ends",)

MUTANTS = [
    Mutant("millpy/ui/routing.py", "    check_role(caller, role)\n", "", FORMS),
    Mutant("millpy/ui/routing.py", "session_of(request), csrf)", "session_of(request), csrf_of(session_of(request)))",
           FORMS),
    Mutant(AUTHENTICATION, "if caller.principal.role < role:", "if False:",
           (f"{OF_ACCESS}test_no_action_with_a_viewers_token_or_without_the_csrf_token",)),
    Mutant(RENDERING, "may_act=bool(csrf) and role >= Role.OPERATOR", "may_act=bool(csrf)",
           (f"{OF_TABLES}test_a_viewer_has_no_action",)),
    Mutant(LOGIN, "if not cookie or not hmac.compare_digest(", "if not cookie and not hmac.compare_digest(",
           (f"{OF_PAGE}test_a_login_needs_the_form_of_this_page",)),
    Mutant(LOGIN, 'return path if own and path.isascii() else "/"', "return path",
           (f"{OF_PAGE}test_the_login_leads_nowhere_else",)),
    Mutant(RENDERING, "autoescape=True", "autoescape=False",
           (f"{OF_VALUES}test_no_expression_of_a_template_writes_markup_or_what_is_invisible",)),
    Mutant("millpy/ui/values.py", 'return visible(str(value), keep="\\n\\t")', "return str(value)",
           (f"{OF_VALUES}test_no_expression_of_a_template_writes_markup_or_what_is_invisible",)),
    Mutant("millpy/ui/downloads.py", """return f"'{value}\"""", "return value",
           (f"{OF_TABLES}test_a_download_reads_page_by_page_up_to_its_bound",)),
    Mutant(LIMITS, '    "Content-Security-Policy": (', '    "Content-Security-Policy-Report-Only": (', HEADERS),
    Mutant(LIMITS, "script-src 'self';", "script-src 'self' 'unsafe-inline';", HEADERS),
    Mutant(LIMITS, "                    if len(body) > BODY_BYTES_MAX:",
           "                    if False:", (f"{OF_LIMITS}test_a_body_of_unknown_length_is_bounded",)),
    Mutant(LIMITS, "named.isdigit() and int(named) > BODY_BYTES_MAX", "False",
           (f"{OF_LIMITS}test_a_body_that_says_it_is_too_long_is_not_read",)),
    Mutant(SESSIONS, OPENED, OPENED.replace("httponly=True", "httponly=False"), SESSION),
    Mutant(SESSIONS, OPENED, OPENED.replace('"strict"', '"lax"'), SESSION),
    Mutant(SESSIONS, OPENED, OPENED.replace("gate.is_encrypted(request)", "False"),
           (f"{OF_ACCESS}test_tls_encrypts_and_cookies_are_secure",)),
    Mutant(SESSIONS, "    gate.forget(caller.session)\n", "", SESSION),
    Mutant(AUTHENTICATION, 'if header and self._configuration.trusts(peer) else ""', 'if header else ""',
           (f"{OF_ACCESS}test_an_identity_comes_only_from_a_proxy_and_acts_only_with_a_session",)),
    Mutant(AUTHENTICATION, "        if self._configuration.trusts(peer):\n", "        if True:\n",
           (f"{OF_LIMITS}test_only_a_proxy_says_for_which_client_and_how_it_asks",)),
    Mutant(AUTHENTICATION, 'if self._configuration.trusts(peer) else ""\n        return request.url', 'if True else ""\n        return request.url',
           (f"{OF_LIMITS}test_only_a_proxy_says_for_which_client_and_how_it_asks",)),
    Mutant(AUTHENTICATION, "                self._failures.count(address)\n", "                pass\n",
           (f"{OF_ACCESS}test_wrong_tokens_are_limited_by_address_and_lock_out_nobody_else",)),
    Mutant(QUERIES, "        if self._role is not None:\n", "        if False:\n", ROW_LEVEL_SECURITY),
    Mutant("millpy/api/answers.py", "None if as_login else role, size=size)", "None)", ROW_LEVEL_SECURITY),
    Mutant("millpy/ui/entrance.py", "if not hmac.compare_digest(given.encode(), code.encode()):", "if False:",
           ("tests/conformance/test_page_command.py::test_the_link_logs_in_until_the_command_ends",)),
]  # fmt: skip
