//! Values of columns and parameters: the four types that both databases have in
//! common.

/// A value as it is written or read, without a copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SqlValue<'a> {
    /// No value.
    Null,
    /// A whole number. Truth is 1 or 0.
    Integer(i64),
    /// A text.
    Text(&'a str),
    /// Bytes.
    Blob(&'a [u8]),
    /// A value that no column of ours has, by the name of its type.
    Other(&'static str),
}

/// A value that is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnedValue {
    /// No value.
    Null,
    /// A whole number.
    Integer(i64),
    /// A text.
    Text(String),
    /// Bytes.
    Blob(Vec<u8>),
}

/// A value of another type or range than the one asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// The value is of another type.
    #[error("expected {expected}, found {found}")]
    Type {
        /// The type that was asked for.
        expected: &'static str,
        /// The type of the value.
        found: &'static str,
    },
    /// The number does not fit.
    #[error("the number {0} is out of range")]
    Range(i128),
    /// The number is not whole, or has more digits than 128 bits hold.
    #[error("a number is not whole or is out of range")]
    NotWhole,
    /// The text is not UTF-8.
    #[error("the text is not UTF-8")]
    Encoding,
}

/// A type that can be a parameter.
pub trait ToSql {
    /// Returns the value to write.
    ///
    /// # Errors
    /// The number fits no column.
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError>;
}

/// A type that can be read from a column.
pub trait FromSql: Sized {
    /// Converts the value of a column.
    ///
    /// # Errors
    /// The column holds another type, or a number that does not fit.
    fn from_sql(value: SqlValue<'_>) -> Result<Self, ValueError>;
}

impl SqlValue<'_> {
    /// Returns the name of the value's type.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "NULL",
            Self::Integer(_) => "an integer",
            Self::Text(_) => "a text",
            Self::Blob(_) => "bytes",
            Self::Other(name) => name,
        }
    }

    fn mismatch(&self, expected: &'static str) -> ValueError {
        ValueError::Type { expected, found: self.type_name() }
    }
}

impl TryFrom<SqlValue<'_>> for OwnedValue {
    type Error = ValueError;

    fn try_from(value: SqlValue<'_>) -> Result<Self, ValueError> {
        Ok(match value {
            SqlValue::Null => Self::Null,
            SqlValue::Integer(number) => Self::Integer(number),
            SqlValue::Text(text) => Self::Text(text.to_owned()),
            SqlValue::Blob(bytes) => Self::Blob(bytes.to_owned()),
            SqlValue::Other(_) => return Err(value.mismatch("an integer, a text or bytes")),
        })
    }
}

impl ToSql for OwnedValue {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        Ok(match self {
            Self::Null => SqlValue::Null,
            Self::Integer(number) => SqlValue::Integer(*number),
            Self::Text(text) => SqlValue::Text(text),
            Self::Blob(bytes) => SqlValue::Blob(bytes),
        })
    }
}

impl FromSql for OwnedValue {
    fn from_sql(value: SqlValue<'_>) -> Result<Self, ValueError> {
        value.try_into()
    }
}

impl<T: ToSql + ?Sized> ToSql for &T {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        (**self).to_sql()
    }
}

impl<T: ToSql> ToSql for Option<T> {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        self.as_ref().map_or(Ok(SqlValue::Null), ToSql::to_sql)
    }
}

impl<T: FromSql> FromSql for Option<T> {
    fn from_sql(value: SqlValue<'_>) -> Result<Self, ValueError> {
        match value {
            SqlValue::Null => Ok(None),
            value => T::from_sql(value).map(Some),
        }
    }
}

macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl ToSql for $integer {
            fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
                let number = i64::try_from(*self);
                number.map(SqlValue::Integer).map_err(|_| ValueError::Range(*self as i128))
            }
        }

        impl FromSql for $integer {
            fn from_sql(value: SqlValue<'_>) -> Result<Self, ValueError> {
                let SqlValue::Integer(number) = value else {
                    return Err(value.mismatch("an integer"));
                };
                Self::try_from(number).map_err(|_| ValueError::Range(number.into()))
            }
        }
    )*};
}
integers!(i32, i64, u8, u16, u32, u64, usize);

impl ToSql for bool {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        Ok(SqlValue::Integer((*self).into()))
    }
}

impl FromSql for bool {
    fn from_sql(value: SqlValue<'_>) -> Result<Self, ValueError> {
        i64::from_sql(value).map(|number| number != 0)
    }
}

impl ToSql for str {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        Ok(SqlValue::Text(self))
    }
}

impl ToSql for String {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        Ok(SqlValue::Text(self))
    }
}

impl FromSql for String {
    fn from_sql(value: SqlValue<'_>) -> Result<Self, ValueError> {
        match value {
            SqlValue::Text(text) => Ok(text.to_owned()),
            other => Err(other.mismatch("a text")),
        }
    }
}

impl ToSql for [u8] {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        Ok(SqlValue::Blob(self))
    }
}

impl<const N: usize> ToSql for [u8; N] {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        Ok(SqlValue::Blob(self))
    }
}

impl ToSql for Vec<u8> {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        Ok(SqlValue::Blob(self))
    }
}

impl FromSql for Vec<u8> {
    fn from_sql(value: SqlValue<'_>) -> Result<Self, ValueError> {
        match value {
            SqlValue::Blob(bytes) => Ok(bytes.to_vec()),
            other => Err(other.mismatch("bytes")),
        }
    }
}

impl ToSql for SqlValue<'_> {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        Ok(*self)
    }
}
