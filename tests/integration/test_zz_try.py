import asyncio, time, logging
from tests.integration.test_dispatcher_stream import *
def test_try(ground):
    logging.basicConfig(level=logging.INFO)
    other = f"{ground.topic}-other"
    create_topics(ground.settings, other)
    async def run():
        ground.write(10)
        async with joined(ground.settings, [ground.topic]) as s:
            await until(lambda: len(s.delivered) == 10)
            t0=time.monotonic()
            await s.stream.subscribe([ground.topic, other])
            c=s.stream._app.consumer._thread._consumer
            last=None
            while time.monotonic()-t0<12:
                st=(c.subscription(), c._coordinator._metadata_snapshot, s.stream._app.consumer.assignment(), s.ownership.partitions(), s.stream.rebalancing, c._client._topics)
                st=repr(st)
                if st!=last: print("%.2f"%(time.monotonic()-t0), st); last=st
                await asyncio.sleep(0.02)
    asyncio.run(run())
