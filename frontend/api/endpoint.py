"""What both generating endpoints do before and after their own part."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from starlette.types import Receive, Scope, Send

from frontend.api import sse
from frontend.api.exchange import Exchange
from frontend.api.fields import FieldCheck, header_value
from frontend.api.job import Job
from frontend.api.reply import Reply, Shape, stream
from frontend.api.service import Service
from frontend.api.texts import Texts
from frontend.api.validate import Wishes
from frontend.errors import RequestRejected


class Endpoint:
    """A generating endpoint.

    Args:
        service: the server's parts.
        texts: tokenizer and template.
        kind: Struct of the body.
    """

    def __init__(self, service: Service, texts: Texts, kind: type[Struct]) -> None:
        self.service = service
        self.texts = texts
        self.fields = FieldCheck(kind, strict=service.options.strict_fields)

    async def begin(self, scope: Scope, receive: Receive, send: Send) -> tuple[Exchange, bytes]:
        """The exchange and the body, when requests are taken at all.

        Raises:
            NotReady: they are not.
            BodyEncoded, BodyTooLarge, ClientGone: of the body.
        """
        exchange = Exchange(scope, receive, send, self.service.running)
        self.service.ready_client()
        return exchange, await exchange.body(self.service.options.max_body_bytes)

    async def answer(
        self,
        exchange: Exchange,
        wishes: Wishes,
        prompts: Sequence[Sequence[int]],
        shape: Shape,
        ignored: list[str],
    ) -> None:
        """Submit checked prompts and send what comes.

        Raises:
            FrontendError: no answer began.
        """
        client, model = self.service.ready_client()
        headers = {"x-ignored-fields": header_value(ignored)} if ignored else {}
        job: Job | None = None
        try:
            job = Job(client, model, self.texts.tokenizer, self.service.metrics, wishes, prompts, shape.name)
            await self._send(exchange, wishes, Reply(exchange, job, shape, headers, self.service.metrics))
        except RequestRejected as error:
            self.service.metrics.rejected(error.reject_code)
            raise
        finally:
            # The reply does it too, but a task that is cancelled before it starts does nothing.
            if job is not None:
                job.abort()

    async def _send(self, exchange: Exchange, wishes: Wishes, reply: Reply) -> None:
        if wishes.stream:
            writer = sse.EventWriter(exchange.send, self.service.options.sse_ping_interval)
            await stream(exchange, reply, writer, include_usage=wishes.include_usage)
            return
        response = await exchange.guard(reply.whole())
        await exchange.respond(response)
