-- A gateway's word that it runs. The rules are in crates/cluster/src/parts.rs, and
-- crates/cluster/src/parts/model.rs makes the same changes.
-- KEYS: server, members, wanted
-- ARGV: LIFE and STEP and MEMORY in ms, number, gateways, is_first, told, run, cluster, most names
-- Returns: now, born, must_claim, then pairs of name and parts.
local life, step, memory = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local number, gateways, told = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[7])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function text(value) return string.format('%.0f', value) end

local state = redis.call('HMGET', KEYS[1], 'born', 'settled', 'last', 'run', 'cluster', 'settled_at')
if state[5] and state[5] ~= ARGV[9] then
  return redis.error_reply('OTHERCLUSTER another cluster uses this database')
end
local born, settled, last = tonumber(state[1]), tonumber(state[2]), tonumber(state[3])
local settled_at = tonumber(state[6])
if not born or state[4] ~= ARGV[8] or now > last + life or now + step < last then
  -- A gateway that starts alone has nobody whose grants were lost.
  born = (ARGV[6] == '1' and gateways <= 1) and 1 or now
  settled, settled_at = 0, 0
  -- Also after the clock was set back: their ends may be hours away.
  redis.call('DEL', KEYS[2])
end

local known = redis.call('HGET', KEYS[2], number)
local since, must_claim, is_new = now, true, ARGV[6]
if known then
  local ends, from, was_new = string.match(known, '^(%d+):(%d+):%d+:(%d)$')
  ends, from = tonumber(ends), tonumber(from)
  if ends >= now and (from >= born or born == 1) then
    since, must_claim = from, false
    if was_new == '1' then is_new = '1' end
  end
end
if must_claim then told = 0 end
redis.call('HSET', KEYS[2], number,
  text(now + life) .. ':' .. text(since) .. ':' .. text(told) .. ':' .. is_new)

-- One that has started since the birth may have taken the place of one that has not claimed yet,
-- so it does not count.
local all = 0
local members = redis.call('HGETALL', KEYS[2])
for i = 1, #members, 2 do
  local ends, of, new = string.match(members[i + 1], '^(%d+):%d+:(%d+):(%d)$')
  ends = tonumber(ends)
  if ends + memory < now then
    redis.call('HDEL', KEYS[2], members[i])
  elseif ends >= now and new == '0' and tonumber(of) == born then
    all = all + 1
  end
end
if settled ~= born and all >= gateways then settled, settled_at = born, now end
redis.call('HSET', KEYS[1], 'born', text(born), 'settled', text(settled),
  'settled_at', text(settled_at), 'last', text(now), 'run', ARGV[8], 'cluster', ARGV[9])

local answer = { now, born, must_claim and 1 or 0 }
local wanted
if redis.call('HLEN', KEYS[3]) > tonumber(ARGV[10]) then
  wanted = redis.call('HRANDFIELD', KEYS[3], ARGV[10], 'WITHVALUES')
else
  wanted = redis.call('HGETALL', KEYS[3])
end
for i = 1, #wanted, 2 do
  local parts, at = string.match(wanted[i + 1], '^(%d+):(%d+)$')
  if tonumber(at) + life < now then
    redis.call('HDEL', KEYS[3], wanted[i])
  else
    answer[#answer + 1] = wanted[i]
    answer[#answer + 1] = tonumber(parts)
  end
end
return answer
