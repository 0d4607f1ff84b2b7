-- The end of a gateway: what it has is free.
-- KEYS: members. ARGV: number.
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known then
  redis.call('HSET', KEYS[1], ARGV[1], (string.gsub(known, '^%d+', '0')))
end
return 1
