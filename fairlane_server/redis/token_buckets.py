"""``fairlane_server.token_bucket`` in Lua, for scripts that keep token buckets in Redis.

Prepend it to the script. ``clock`` takes the time as an argument; an empty one means the server's clock, which all
processes share.
"""

BUCKET_FUNCTIONS = """
local function clock(given)
  local now = tonumber(given)
  if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return now
end
local function refilled(capacity, per_ms, amount, elapsed_ms)
  return math.min(capacity, amount + elapsed_ms * per_ms)
end
local function wait_ms(capacity, per_ms, missing, clock_is_behind_ms)
  if missing <= capacity * 1e-9 then
    return 0
  end
  return clock_is_behind_ms + math.floor(missing / per_ms) + 1
end
local function full_in_ms(capacity, per_ms, amount)
  if amount >= capacity then
    return 0
  end
  return math.ceil((capacity - amount) / per_ms)
end
"""
