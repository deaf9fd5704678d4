-- The other formats of keys. Release 0.1.0 had no number in its keys, and did not register its format.
local FIRST_FORMAT = 1

local function keys_of(number)
  return number == FIRST_FORMAT and namespace or namespace .. number .. ':'
end
