// Values on their way into a message, and out of one. On the way in protobufjs would take nearly
// everything, and change what does not fit without a word.

import protobuf from 'protobufjs';
import { InvalidArgumentError } from './errors.js';

const RANGES = {
  int32: [-(2n ** 31n), 2n ** 31n - 1n],
  uint32: [0n, 2n ** 32n - 1n],
  uint64: [0n, 2n ** 64n - 1n],
};

/**
 * `values` by name as a message of a protobufjs type takes them; undefined and null are unset.
 * InvalidArgumentError, with the field as the API names it, for what the field cannot hold.
 */
export function message(type, values, prefix = '') {
  if (typeof values !== 'object' || values === null || Array.isArray(values)) {
    refuse(prefix.slice(0, -1) || type.name, values, 'an object is wanted');
  }
  const made = {};
  for (const [name, value] of Object.entries(values)) {
    if (value === undefined || value === null) continue;
    const path = prefix + snake(name);
    if (!Object.hasOwn(type.fields, name)) refuse(path, value, `${type.name} has no such field`);
    made[name] = whole(type.fields[name].resolve(), value, path);
  }
  return made;
}

/** Throws the error of a field. */
export function refuse(field, value, reason) {
  const text = `${field}: ${brief(value)} is not possible (${reason})`;
  throw new InvalidArgumentError(text, [{ field, description: reason }]);
}

/** A name as the API writes it. */
export function snake(name) {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}

function whole(field, value, path) {
  if (field.map) return map(field, value, path);
  if (!field.repeated) return single(field, value, path);
  // A string can be iterated too: stop: 'END' would become three stops.
  if (!Array.isArray(value) && !ArrayBuffer.isView(value))
    refuse(path, value, 'an array is wanted');
  // As the server names them: chat.messages[1].content.
  return Array.from(value, (item, i) => single(field, item, `${path}[${i}]`));
}

function map(field, value, path) {
  const isMap = value instanceof Map;
  if (typeof value !== 'object' || Array.isArray(value)) refuse(path, value, 'an object is wanted');
  const made = {};
  for (const [key, item] of isMap ? value : Object.entries(value)) {
    // The keys of an object are strings.
    made[scalar(field.keyType, isMap ? key : Number(key), path)] = single(field, item, path);
  }
  return made;
}

function single(field, value, path) {
  if (field.resolvedType) return message(field.resolvedType, value, `${path}.`);
  return scalar(field.type, value, path);
}

function scalar(type, value, path) {
  if (type in RANGES) return integer(type, value, path);
  if (type === 'string') return string(value, path);
  const wanted = type === 'bool' ? 'boolean' : 'number';
  if (typeof value !== wanted) refuse(path, value, `a ${wanted} is wanted`);
  return value;
}

function string(value, path) {
  if (typeof value !== 'string') refuse(path, value, 'a string is wanted');
  if (/\p{Surrogate}/u.test(value)) refuse(path, value, 'it holds half a character');
  return value;
}

function integer(type, value, path) {
  if (typeof value === 'number' && Number.isInteger(value) && !Number.isSafeInteger(value)) {
    refuse(path, value, 'a number so large has lost bits; give a BigInt, as 123n');
  }
  if (typeof value !== 'bigint' && !Number.isInteger(value)) {
    refuse(path, value, 'an integer is wanted');
  }
  const [least, most] = RANGES[type];
  if (value < least || value > most) refuse(path, value, `${least} to ${most} is possible`);
  return type === 'uint64' ? String(value) : Number(value);
}

function brief(value) {
  const text = typeof value === 'string' ? JSON.stringify(value) : String(value);
  return text.length <= 60 ? text : `${text.slice(0, 57)}...`;
}

/**
 * A decoded message as a plain object: 64 bits as BigInts, enum values as "stop" of
 * FINISH_REASON_STOP ("unspecified" for one that this client does not know). What is unset and has
 * no default is left out.
 */
export function told(type, decoded) {
  const made = {};
  for (const field of type.fieldsArray) {
    const { name } = field.resolve();
    // A member of a oneof, as every optional field is, or a message.
    const mayBeUnset =
      field.partOf || (field.resolvedType instanceof protobuf.Type && !field.repeated);
    if (mayBeUnset && !(Object.hasOwn(decoded, name) && decoded[name] !== null)) continue;
    const value = decoded[name];
    if (field.map) made[name] = { ...value };
    else made[name] = field.repeated ? value.map((one) => plain(field, one)) : plain(field, value);
  }
  return made;
}

function plain(field, value) {
  if (field.resolvedType instanceof protobuf.Enum) return word(field.resolvedType, value);
  if (field.resolvedType) return told(field.resolvedType, value);
  return field.type === 'uint64' ? BigInt(value.toString()) : value;
}

function word(type, number) {
  const prefix = `${snake(type.name).slice(1)}_`.toUpperCase();
  return (type.valuesById[number] ?? `${prefix}UNSPECIFIED`).slice(prefix.length).toLowerCase();
}
