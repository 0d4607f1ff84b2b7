-- Calls of one gateway for parts of rates. The rules are in crates/cluster/src/parts.rs, and
-- crates/cluster/src/parts/model.rs makes the same changes.
-- KEYS: server, members, wanted, then a pool for each call
-- ARGV: LIFE and STEP in ms, WHOLE, number, the birth of the store that is meant, then for each call: name, call, claim, give, room,
-- need_level, need_parts, least, spare, fill, size
-- Returns: now, then for each call the list of parts, level, free, pooled and users, or 0 for a
-- call that is not newer than one before it. Returns `now` alone if a beat must come first.
local life, step, WHOLE = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local number = ARGV[4]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local min, max, floor = math.min, math.max, math.floor
local function text(value) return string.format('%.0f', value) end

local state = redis.call('HMGET', KEYS[1], 'born', 'settled', 'last', 'settled_at')
local born, settled, last = tonumber(state[1]), tonumber(state[2]), tonumber(state[3])
if not born or ARGV[5] ~= state[1] or now > last + life or now + step < last then return { now } end

-- The members by number, each with its end and the time since which it was not lost.
local members = {}
local found = redis.call('HGETALL', KEYS[2])
for i = 1, #found, 2 do
  local ends, since = string.match(found[i + 1], '^(%d+):(%d+):')
  members[found[i]] = { ends = tonumber(ends), since = tonumber(since) }
end
local own = members[number]
if not own or own.ends < now then return { now } end
-- The time since which the store grants. What nobody has refills since then, too: before,
-- gateways may have used what they had not claimed yet.
local begun = born == 1 and 1 or born + life
if settled == born then begun = min(begun, tonumber(state[4])) end
local may_grant = now >= begun

local function ask(key, a)
  local name = ARGV[a]
  local call, claim, give, room = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]),
    tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4])
  local need_level, need_parts, least = tonumber(ARGV[a + 5]), tonumber(ARGV[a + 6]),
    tonumber(ARGV[a + 7])
  local spare, fill, size = tonumber(ARGV[a + 8]), tonumber(ARGV[a + 9]), tonumber(ARGV[a + 10])

  local pool = { born = born, level = born == 1 and WHOLE or 0, at = born,
    fill = fill, size = size }
  local entries, removed = {}, {}
  local fields = redis.call('HGETALL', key)
  local is_known = false
  for i = 1, #fields, 2 do
    if fields[i] == 'born' then is_known = tonumber(fields[i + 1]) == born end
  end
  if is_known then
    for i = 1, #fields, 2 do
      local of = string.match(fields[i], '^g(%d+)$')
      if of then
        local since, at, parts, wanted =
          string.match(fields[i + 1], '^(%d+):(%d+):(%d+):(%d+)$')
        entries[of] = { since = tonumber(since), call = tonumber(at), parts = tonumber(parts),
          wanted = tonumber(wanted) }
      else
        pool[fields[i]] = tonumber(fields[i + 1])
      end
    end
  elseif #fields > 0 then
    redis.call('DEL', key)
  end

  local function free()
    local left = WHOLE
    for _, entry in pairs(entries) do left = left - entry.parts end
    return left
  end

  -- The rate of a newer config: the units stay, and are a smaller part of a larger burst. The
  -- time until now counts at the slower of both rates.
  if size > pool.size then pool.level = floor(pool.level * (pool.size / size)) end
  if pool.fill ~= 0 and (fill == 0 or pool.fill <= fill) then pool.fill = fill end

  -- Refill.
  pool.at = max(pool.at, min(begun, now))
  local left, passed = free(), max(now - pool.at, 0)
  if pool.fill == 0 or now < pool.at then
    pool.at = now
  else
    local grown = floor(left * min(passed, pool.fill) / pool.fill)
    if grown > 0 then
      pool.level = min(pool.level + grown, left)
      if passed >= pool.fill then
        pool.at = now
      else
        pool.at = min(pool.at + math.ceil(grown * pool.fill / left), now)
      end
    end
  end

  -- What gateways had that have ended or were lost is free.
  local before = left
  for of, entry in pairs(entries) do
    local member = members[of]
    if not member then
      entries[of] = nil
      removed[#removed + 1] = of
    elseif member.ends < now or member.since ~= entry.since then
      entry.parts, entry.wanted = 0, 0
    end
  end
  if free() ~= before then pool.at = now end

  -- The call itself.
  before = free()
  local entry = entries[number] or { since = 0, call = 0, parts = 0, wanted = 0 }
  local answer = 0
  if call > entry.call then
    local others = WHOLE - before - entry.parts
    entry.parts = min(claim, WHOLE - others)
    left = WHOLE - others - entry.parts
    pool.level = min(pool.level + give, left)
    local granted, level = 0, 0
    if may_grant then
      granted = min(max(need_parts, min(need_parts + spare, floor(left / 2))), left)
      if granted < least then granted = 0 end
      local fair = left > 0 and floor(pool.level * granted / left) or 0
      level = min(pool.level, max(need_level, fair), room + granted)
    end
    entry.parts = entry.parts + granted
    pool.level = min(pool.level - level, left - granted)
    local lacks = max(need_level - min(need_level, level), need_parts - min(need_parts, granted))
    if lacks > 0 then lacks = lacks + spare - min(spare, max(granted - need_parts, 0)) end
    entry.wanted = min(lacks, WHOLE - entry.parts)
    entry.since, entry.call = own.since, call
    pool.fill = fill
    entries[number] = entry
    if free() ~= before then pool.at = now end
    local users = 0
    for _, each in pairs(entries) do
      if each.parts + each.wanted > 0 then users = users + 1 end
    end
    answer = { entry.parts, level, free(), pool.level, users }
  end
  pool.size = size

  local row = { 'born', text(pool.born), 'level', text(pool.level), 'at', text(pool.at),
    'fill', text(pool.fill), 'size', text(pool.size) }
  local wanted = 0
  for of, each in pairs(entries) do
    wanted = wanted + each.wanted
    row[#row + 1] = 'g' .. of
    row[#row + 1] = text(each.since) .. ':' .. text(each.call) .. ':' .. text(each.parts)
      .. ':' .. text(each.wanted)
  end
  redis.call('HSET', key, unpack(row))
  if #removed > 0 and is_known then
    for i = 1, #removed do redis.call('HDEL', key, 'g' .. removed[i]) end
  end
  -- Long enough that a pool which is forgotten is full again, and that a gateway which has
  -- parts has called.
  if pool.fill > 0 then redis.call('PEXPIRE', key, text(pool.fill + 120000)) end
  if wanted > 0 then
    redis.call('HSET', KEYS[3], name, text(wanted) .. ':' .. text(now))
  else
    redis.call('HDEL', KEYS[3], name)
  end
  return answer
end

local answers = { now }
for i = 4, #KEYS do
  answers[i - 2] = ask(KEYS[i], 6 + 11 * (i - 4))
end
return answers
