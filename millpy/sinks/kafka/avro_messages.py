"""AvroMessages: records of a class as Avro messages of a topic, with the id of their schema if there is a registry."""

from __future__ import annotations

import asyncio
from typing import Any

from millpy.errors import ConfigError, SinkUnavailableError
from millpy.formats import Avro
from millpy.formats.avro import check_package
from millpy.formats.avro_writing import check_fields, schema_of, writer_of
from millpy.formats.schema_registry import IncompatibleSchemaError, RegistryLoginError, SchemaCache, cache_of, framed
from millpy.model.record import RecordType

TEST_ID = 0


class AvroMessages:
    """Writes records of one class.

    Raises:
        ConfigError: the package fastavro is missing, or no registry is named.
        GraphError: the class and the schema do not fit.
    """

    def __init__(self, topic: str, format: Avro, record_type: RecordType) -> None:
        check_package()
        self._format = format
        self._subject = f"{topic}-value"
        self._schema = schema_of(record_type) if format.schema is None else format.schema
        check_fields(self._schema, record_type)
        self._write = writer_of(self._schema)
        self._cache: SchemaCache | None = None if format.registry is None else cache_of(format.registry)
        self._id: int | None = None

    def encode(self, record: Any) -> bytes:
        """Return the message of a record. Raises ValueError if it does not fit the schema."""
        payload = self._write(record)
        if self._cache is None:
            return payload
        if self._id is None:
            self._id = self._cache.known_id(self._subject, self._schema)
            assert self._id is not None, "prepare the sink first"
        return framed(self._id, payload)

    async def prepare(self) -> None:
        """Learn the id of the schema.

        Raises:
            ConfigError: the registry refuses the schema, or our login.
            SinkUnavailableError: the registry does not answer.
        """
        if self._cache is None or self._cache.known_id(self._subject, self._schema) is not None:
            return
        try:
            await asyncio.to_thread(self._cache.id_of, self._subject, self._schema, register=self._format.register)
        except IncompatibleSchemaError as error:
            raise ConfigError(
                f"the schema registry refuses the schema of subject {self._subject!r}: {error}",
                hint="change the record class so that it is compatible, or the subject's compatibility level"
                if self._format.register
                else "register it, or let the sink do so with Avro(register=True)",
            ) from error
        except RegistryLoginError as error:
            raise ConfigError(
                f"the schema registry refuses our login for subject {self._subject!r}: {error}",
                hint="SchemaRegistry(login=Login(…)), or give that user the right to register schemas under the subject"
                if self._format.register
                else "SchemaRegistry(login=Login(…)), or give that user the right to read the subject",
            ) from error
        except OSError as error:
            raise SinkUnavailableError(
                f"the schema registry does not answer: {error}", hint="the step takes no input until it does"
            ) from error

    def assume_prepared(self) -> None:
        """Give the schema an id, unless it has one."""
        if self._cache is not None and self._cache.known_id(self._subject, self._schema) is None:
            self._cache.learn(self._subject, self._schema, TEST_ID)
