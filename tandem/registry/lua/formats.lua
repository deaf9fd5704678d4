-- Formats of keys besides this one. 0.1.0 had no number in its keys, and told nobody that its format is the first.
local FIRST_FORMAT = 1

local function keys_of(number)
  return number == FIRST_FORMAT and namespace or namespace .. number .. ':'
end
